// SPDX-License-Identifier: Apache-2.0
// The gateway: calls, and its event stream for ever. The bearer token stays in this tab (sessionStorage).

let token = sessionStorage.getItem("semkv-token") || "";
let asking = () => {};

export class Refused extends Error {}

/** What is done when the gateway wants a token, or another one. */
export function onTokenWanted(ask) { asking = ask; }

export function setToken(text) {
  token = text.trim();
  sessionStorage.setItem("semkv-token", token);
}

export async function call(path, options = {}) {
  const headers = token ? { ...options.headers, Authorization: `Bearer ${token}` } : options.headers;
  const answer = await fetch(path, { ...options, headers });
  if (answer.status === 401) { asking(); throw new Refused(token ? "the gateway does not know this token" : "a token is needed"); }
  return answer;
}

/** POST of JSON; the parsed answer, whatever its status, with `error` where the gateway said one. */
export async function post(path, body) {
  const answer = await call(path, { method: "POST", body: JSON.stringify(body), headers: { "Content-Type": "application/json" } });
  return answer.json();
}

/** Follows the event stream from `back` older events on; comes back to where it was. `say(state, text)` tells how it goes. */
export async function follow(kinds, back, take, say) {
  let position = `last=${back}`;
  for (;;) {
    try {
      const answer = await call(`/memory/events?${kinds.map((kind) => `type=${kind}`).join("&")}&${position}`);
      if (!answer.ok) throw new Error((await answer.json()).error || `the gateway answers ${answer.status}`);
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      let rest = "";
      for (;;) {
        const { value, done } = await reader.read();
        if (done) break;
        rest += value;
        const blocks = rest.split("\n\n");
        rest = blocks.pop();
        for (const block of blocks) {
          const { event, data, id } = parsed(block);
          if (id) position = `after=${id}`;
          if (event === "ready") say("live", "live"); else if (event) take(event, data);
        }
      }
      say("lost", "the gateway ended the stream; coming back");
    } catch (error) {
      if (error instanceof Refused) say("waiting", error.message);
      else say("lost", `${error.message.includes("fetch") ? "the gateway does not answer" : error.message}; trying again`);
    }
    await new Promise((again) => setTimeout(again, 1000));
  }
}

function parsed(block) {
  const found = {};
  for (const line of block.split("\n")) {
    const at = line.indexOf(":");
    if (at > 0) found[line.slice(0, at)] = line.slice(at + 1).trimStart();
  }
  if (found.data) found.data = JSON.parse(found.data);
  return found;
}
