// SPDX-License-Identifier: Apache-2.0
// Copies of contiguous runs, and of grids of pieces, a few side by side where that is faster.
//
// A page is read to its end in one go, but the processor fetches ahead only inside a memory page and within one stream
// of addresses, so that each short run begins with a wait. Four runs read in turn, a few lines of each, wait at the
// same time. Short-lived and used by one thread; `finish` must be called before the bytes are read.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>

#include "copy.h"
#include "row_copy.h"

namespace semkv {

struct Run {
  std::byte* dst;
  const std::byte* src;
  std::size_t n;
};

inline constexpr std::size_t kSideBySide = 4;
using Runs = std::array<Run, kSideBySide>;

// Copies as much as all runs have; what is left of each, less than a few lines or the longer ones' rest, stays in it.
using CopyRunsFn = void (*)(Runs& runs);

#if defined(SEMKV_X86)
namespace detail {

inline constexpr std::size_t kStride = 256;  // of each run in turn

// Brings every run's dst to a `width` boundary and returns the whole strides that all runs then have.
inline std::size_t common_bytes(Runs& runs, std::size_t width) {
  std::size_t common = runs.front().n;
  for (Run& run : runs) {
    const std::size_t head = head_bytes(run.dst, run.n, width);
    std::memcpy(run.dst, run.src, head);
    run.dst += head, run.src += head, run.n -= head;
    common = std::min(common, run.n);
  }
  return common / kStride * kStride;
}

inline void advance(Runs& runs, std::size_t bytes) {
  for (Run& run : runs) run.dst += bytes, run.src += bytes, run.n -= bytes;
}

__attribute__((target("avx512f"))) inline void stream_runs_avx512(Runs& runs) {
  const std::size_t common = common_bytes(runs, 64);
  for (std::size_t at = 0; at < common; at += kStride) {
    for (const Run& run : runs) {
      const std::byte* src = run.src + at;
      std::byte* dst = run.dst + at;
      const __m512i a = _mm512_loadu_si512(src);
      const __m512i b = _mm512_loadu_si512(src + 64);
      const __m512i c = _mm512_loadu_si512(src + 128);
      const __m512i d = _mm512_loadu_si512(src + 192);
      _mm512_stream_si512(reinterpret_cast<__m512i*>(dst), a);
      _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + 64), b);
      _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + 128), c);
      _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + 192), d);
    }
  }
  advance(runs, common);
}

__attribute__((target("avx2"))) inline void stream_runs_avx2(Runs& runs) {
  const std::size_t common = common_bytes(runs, 32);
  for (std::size_t at = 0; at < common; at += kStride) {
    for (const Run& run : runs) {
      for (std::size_t i = at; i < at + kStride; i += 64) {
        const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(run.src + i));
        const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(run.src + i + 32));
        _mm256_stream_si256(reinterpret_cast<__m256i*>(run.dst + i), a);
        _mm256_stream_si256(reinterpret_cast<__m256i*>(run.dst + i + 32), b);
      }
    }
  }
  advance(runs, common);
}

}  // namespace detail
#endif

// The widest streaming copy of several runs that this CPU has; null where it has none.
inline CopyRunsFn stream_runs() {
#if defined(SEMKV_X86)
  static const CopyRunsFn chosen = __builtin_cpu_supports("avx512f") ? &detail::stream_runs_avx512
                                   : __builtin_cpu_supports("avx2")  ? &detail::stream_runs_avx2
                                                                     : nullptr;
  return chosen;
#else
  return nullptr;
#endif
}

class RunBatch {
 public:
  // `scattered`: the runs are read from places far apart. Written far apart but read in order, as a scatter does, they
  // gain nothing.
  RunBatch(bool streaming, bool scattered)
      : streaming_(streaming),
        scattered_(scattered),
        copy_(streaming ? stream_copy() : &plain_copy),
        several_(streaming && scattered ? stream_runs() : nullptr) {}

  void add(std::byte* dst, const std::byte* src, std::size_t n) {
    if (several_ == nullptr || n < kWorthIt) return copy_(dst, src, n);
    runs_[held_] = {dst, src, n};
    if (++held_ == kSideBySide) {
      several_(runs_);
      flush();
    }
  }

  void add(const RowGrid& grid) {
    if (!streaming_) return copy_rows(grid);
    if (!scattered_) return stream_rows(&grid, 1);
    if (waiting_ > 0 && !alike(grid, grids_.front())) flush_grids();
    grids_[waiting_] = grid;
    if (++waiting_ == kSideBySide) flush_grids();
  }

  // Copies what is still held, and makes all of it visible to whoever synchronises with this thread afterwards.
  void finish() {
    flush();
    flush_grids();
    if (streaming_) stream_fence();
  }

 private:
  static constexpr std::size_t kWorthIt = 1024;

  void flush() {
    for (std::size_t i = 0; i < held_; ++i) copy_(runs_[i].dst, runs_[i].src, runs_[i].n);
    held_ = 0;
  }

  void flush_grids() {
    if (waiting_ > 0) stream_rows(grids_.data(), waiting_);
    waiting_ = 0;
  }

  static bool alike(const RowGrid& a, const RowGrid& b) {
    return a.tokens == b.tokens && a.heads == b.heads && a.piece == b.piece && a.dst_token == b.dst_token &&
           a.src_token == b.src_token && a.dst_head == b.dst_head && a.src_head == b.src_head;
  }

  bool streaming_;
  bool scattered_;
  CopyFn copy_;
  CopyRunsFn several_;
  Runs runs_{};
  std::size_t held_ = 0;
  std::array<RowGrid, kSideBySide> grids_{};
  std::size_t waiting_ = 0;
};

}  // namespace semkv
