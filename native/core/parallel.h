// SPDX-License-Identifier: Apache-2.0
// Divides work among a few short-lived threads.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

namespace semkv {

// Below this a thread costs more to start than it copies.
inline constexpr std::uint64_t kBytesPerThread = std::uint64_t{2} << 20;

// Calls work(first, last) over [0, items), cut into as many parts as threads are allowed and worth it. Returns when all
// parts are done. `work` must not throw.
template <class Work>
void divide(std::size_t items, std::uint64_t bytes, unsigned threads, Work&& work) {
  const auto useful = static_cast<std::size_t>(std::max<std::uint64_t>(1, bytes / kBytesPerThread));
  const std::size_t crew = std::min({static_cast<std::size_t>(std::max(1U, threads)), useful, items});
  std::vector<std::jthread> helpers;
  helpers.reserve(crew > 0 ? crew - 1 : 0);
  for (std::size_t t = 1; t < crew; ++t) {
    helpers.emplace_back([&work, items, t, crew] { work(items * t / crew, items * (t + 1) / crew); });
  }
  if (crew > 0) work(0, items / crew);
}

}  // namespace semkv
