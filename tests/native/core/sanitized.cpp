// SPDX-License-Identifier: Apache-2.0
// Exercises the copiers under AddressSanitizer and UndefinedBehaviorSanitizer: random planes in memory of exactly their
// size, so that a byte too far is an error, compared with a loop that nobody could get wrong. Prints SANITIZED at the
// end.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <stdexcept>
#include <vector>

#include "block_copier.h"
#include "copy.h"
#include "kv_format.h"
#include "row_copier.h"

namespace {

std::mt19937_64 random_engine(11);

std::uint64_t pick(std::uint64_t low, std::uint64_t high) {
  return std::uniform_int_distribution<std::uint64_t>(low, high)(random_engine);
}

void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "wrong: %s\n", what);
  std::exit(1);
}

struct Memory {
  std::unique_ptr<std::byte[]> bytes;
  std::size_t size;
  explicit Memory(std::size_t n) : bytes(new std::byte[n]), size(n) {
    for (std::size_t i = 0; i < n; ++i) bytes[i] = static_cast<std::byte>(random_engine());
  }
};

std::vector<std::int64_t> some_ids(std::int64_t blocks) {
  std::vector<std::int64_t> ids(static_cast<std::size_t>(blocks));
  for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int64_t>(i);
  if (pick(0, 1) != 0) std::shuffle(ids.begin(), ids.end(), random_engine);
  ids.resize(pick(1, ids.size()));
  return ids;
}

semkv::Stores any_stores() {
  constexpr semkv::Stores kAll[] = {semkv::Stores::automatic, semkv::Stores::plain, semkv::Stores::streaming};
  return kAll[pick(0, 2)];
}

void rows_once() {
  const std::uint64_t heads = pick(1, 4), tokens_of_block = pick(1, 5);
  constexpr std::uint64_t kPieces[] = {1, 2, 3, 4, 32, 64, 100, 128, 256};
  const std::uint64_t piece = kPieces[pick(0, 8)];
  const bool heads_first = pick(0, 1) != 0;
  const auto blocks = static_cast<std::int64_t>(pick(1, 6));
  const std::uint64_t block_bytes = heads * tokens_of_block * piece, gap = pick(0, 1) * pick(0, 70);
  const std::uint64_t planes_count = pick(1, 3), row = heads * piece;
  const bool joined = pick(0, 1) != 0;  // all planes are columns of one row, or each has rows of its own
  std::vector<Memory> pages;
  std::vector<semkv::RowPlane> planes;
  for (std::uint64_t p = 0; p < planes_count; ++p) {
    pages.emplace_back(static_cast<std::size_t>(blocks - 1) * (block_bytes + gap) + block_bytes);
    planes.push_back({pages.back().bytes.get(), blocks, heads, piece, block_bytes + gap,
                      heads_first ? piece : heads * piece, heads_first ? tokens_of_block * piece : piece,
                      joined ? 0 : p * row, joined ? planes_count * row : row, joined ? p * row : 0});
  }
  const semkv::RowCopier copier(planes, tokens_of_block, planes_count * heads * piece);
  const auto ids = some_ids(blocks);
  const std::uint64_t tokens = ids.size() * tokens_of_block - pick(0, tokens_of_block - 1);
  const std::uint64_t skip = pick(0, tokens);
  const auto threads = static_cast<unsigned>(pick(1, 3));
  Memory object(tokens * copier.bytes_per_token());
  copier.copy_blocks(semkv::Direction::gather, ids, tokens, object.bytes.get(), object.size, skip, threads,
                     any_stores());
  const auto page_byte = [&](std::uint64_t p, std::uint64_t t, std::uint64_t h, std::uint64_t b) -> std::byte& {
    const semkv::RowPlane& plane = planes[p];
    return plane.base[static_cast<std::uint64_t>(ids[t / tokens_of_block]) * plane.block_stride +
                      t % tokens_of_block * plane.token_stride + h * plane.head_stride + b];
  };
  const auto check = [&](const char* what) {
    for (std::uint64_t p = 0; p < planes_count; ++p) {
      for (std::uint64_t t = skip; t < tokens; ++t) {
        for (std::uint64_t h = 0; h < heads; ++h) {
          for (std::uint64_t b = 0; b < piece; ++b) {
            const std::uint64_t of_plane = joined ? t * planes_count * row + p * row : p * row * tokens + t * row;
            const std::uint64_t at = of_plane + h * piece + b;
            require(object.bytes[at] == page_byte(p, t, h, b), what);
          }
        }
      }
    }
  };
  check("rows gathered");
  for (std::size_t i = 0; i < object.size; ++i) object.bytes[i] ^= std::byte{0x5a};
  copier.copy_blocks(semkv::Direction::scatter, ids, tokens, object.bytes.get(), object.size, skip, threads,
                     any_stores());
  check("rows scattered");
  std::vector<std::int64_t> slots;
  for (std::uint64_t t = 0; t < tokens; ++t) {
    slots.push_back(ids[t / tokens_of_block] * static_cast<std::int64_t>(tokens_of_block) +
                    static_cast<std::int64_t>(t % tokens_of_block));
  }
  for (std::size_t i = 0; i < object.size; ++i) object.bytes[i] = std::byte{0};
  copier.copy_slots(semkv::Direction::gather, slots, object.bytes.get(), object.size, skip, threads, any_stores());
  check("slots gathered");
}

void blocks_once() {
  const auto blocks = static_cast<std::int64_t>(pick(1, 9));
  std::vector<Memory> pages;
  std::vector<semkv::Plane> planes;
  for (std::uint64_t p = pick(1, 3); p > 0; --p) {
    // Long blocks are read several side by side, each to its own end.
    const std::uint64_t bytes = pick(0, 1) != 0 ? pick(1, 700) : pick(1000, 2000), gap = pick(0, 1) * pick(0, 70);
    pages.emplace_back(static_cast<std::size_t>(blocks - 1) * (bytes + gap) + bytes);
    planes.push_back({pages.back().bytes.get(), bytes + gap, bytes, blocks});
  }
  const semkv::BlockCopier copier(planes);
  const auto ids = some_ids(blocks);
  const std::size_t skip = pick(0, ids.size());
  Memory object(copier.object_bytes(ids.size()));
  const auto threads = static_cast<unsigned>(pick(1, 3));
  for (const auto direction : {semkv::Direction::gather, semkv::Direction::scatter}) {
    for (std::size_t i = 0; i < object.size; ++i) object.bytes[i] ^= std::byte{0x33};
    copier.copy(direction, ids, object.bytes.get(), object.size, skip, threads, any_stores());
    std::uint64_t at = 0;
    for (const semkv::Plane& plane : planes) {
      for (std::size_t i = skip; i < ids.size(); ++i) {
        for (std::uint64_t b = 0; b < plane.bytes; ++b) {
          require(object.bytes[at + i * plane.bytes + b] ==
                      plane.base[static_cast<std::uint64_t>(ids[i]) * plane.stride + b],
                  "blocks");
        }
      }
      at += plane.bytes * ids.size();
    }
  }
}

// Every copy that this CPU can run, also those that a wider one takes the place of.
std::vector<semkv::CopyRunsFn> all_copies() {
  std::vector<semkv::CopyRunsFn> copies{&semkv::plain_copy, semkv::stream_copy()};
#if defined(SEMKV_X86)
  if (__builtin_cpu_supports("avx2")) copies.push_back(&semkv::detail::stream_copy_avx2);
#endif
  return copies;
}

// Runs of unlike lengths, beginning anywhere; the bytes between them are nobody's.
void runs_once() {
  for (const semkv::CopyRunsFn copy : all_copies()) {
    const std::size_t count = pick(0, 8);
    std::vector<Memory> from, to, expected;
    std::vector<semkv::Run> runs;
    for (std::size_t k = 0; k < count; ++k) {
      const std::size_t n = pick(0, 1) != 0 ? pick(0, 300) : pick(0, 1500);
      const std::size_t begin = pick(0, 80), end = pick(0, 80), lead = pick(0, 80);
      from.emplace_back(lead + n);
      to.emplace_back(begin + n + end);
      expected.emplace_back(to.back().size);
      std::copy_n(to.back().bytes.get(), to.back().size, expected.back().bytes.get());
      std::copy_n(from.back().bytes.get() + lead, n, expected.back().bytes.get() + begin);
      runs.push_back({to.back().bytes.get() + begin, from.back().bytes.get() + lead, n});
    }
    copy(runs.data(), count);
    semkv::stream_fence();
    for (std::size_t k = 0; k < count; ++k) {
      require(std::equal(to[k].bytes.get(), to[k].bytes.get() + to[k].size, expected[k].bytes.get()), "runs");
    }
  }
}

template <class Error, class Call>
void refuses(Call&& call, const char* what) {
  try {
    call();
  } catch (const Error&) {
    return;
  }
  require(false, what);
}

void refusals() {
  Memory page(64), object(64);
  const semkv::BlockCopier copier({{page.bytes.get(), 16, 16, 4}});
  const std::vector<std::int64_t> outside{0, 4}, negative{-1}, fine{0, 1}, far{std::int64_t{1} << 62};
  const auto copy = [&](const std::vector<std::int64_t>& ids, std::size_t size, std::size_t skip) {
    copier.copy(semkv::Direction::gather, ids, object.bytes.get(), size, skip, 1, semkv::Stores::plain);
  };
  refuses<std::out_of_range>([&] { copy(outside, 64, 0); }, "an id outside");
  refuses<std::out_of_range>([&] { copy(negative, 64, 0); }, "a negative id");
  refuses<std::out_of_range>([&] { copy(far, 64, 0); }, "an id far outside");
  refuses<std::length_error>([&] { copy(fine, 31, 0); }, "a short object");
  refuses<std::out_of_range>([&] { copy(fine, 64, 3); }, "a skip too long");
  refuses<std::invalid_argument>([&] { semkv::BlockCopier({{page.bytes.get(), 8, 16, 4}}); }, "overlapping blocks");
  refuses<std::overflow_error>([&] { copier.object_bytes(std::uint64_t{1} << 62); }, "an object beyond 64 bits");
  const std::vector<std::int64_t> slots{2, 3, 5};
  refuses<std::invalid_argument>([&] { semkv::block_ids(slots, 0, 3, 2); }, "a slot inside a block");
}

}  // namespace

int main() {
  for (int i = 0; i < 2000; ++i) {
    rows_once();
    blocks_once();
  }
  for (int i = 0; i < 200; ++i) runs_once();
  refusals();
  for (const semkv::FormatFacts& f : semkv::kFormats) require(&semkv::facts(f.format) == &f, "facts");
  std::puts("SANITIZED");
}
