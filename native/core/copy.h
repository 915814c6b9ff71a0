// SPDX-License-Identifier: Apache-2.0
// Copies of contiguous runs, by plain memcpy or by streaming stores that leave the caches alone.
//
// A page is read to its end in one go, but the processor fetches ahead only inside a memory page and within one stream
// of addresses, so that each run begins with a wait. Several runs read in turn, a few lines of each, wait at the same
// time. Callers choose; a streaming copy must be followed by stream_fence() before another thread is told of the data.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#define SEMKV_X86 1
#endif

namespace semkv {

struct Run {
  std::byte* dst;
  const std::byte* src;
  std::size_t n;
};

// Copies `count` runs to their ends; it uses `runs` up. Runs that write the same bytes are copied in no given order.
using CopyRunsFn = void (*)(Run* runs, std::size_t count);

inline void plain_copy(Run* runs, std::size_t count) {
  for (std::size_t k = 0; k < count; ++k) std::memcpy(runs[k].dst, runs[k].src, runs[k].n);
}

#if defined(SEMKV_X86)
namespace detail {

inline constexpr std::size_t kStride = 256;  // of each run in turn

// Brings every run's dst to a `width` boundary and returns the whole strides that all runs then have.
inline std::size_t common_bytes(Run* runs, std::size_t count, std::size_t width) {
  std::size_t common = count == 0 ? 0 : SIZE_MAX;
  for (Run* run = runs; run != runs + count; ++run) {
    const std::size_t past = reinterpret_cast<std::uintptr_t>(run->dst) % width;
    const std::size_t head = past == 0 ? 0 : std::min(width - past, run->n);
    std::memcpy(run->dst, run->src, head);
    run->dst += head, run->src += head, run->n -= head;
    common = std::min(common, run->n);
  }
  return common / kStride * kStride;
}

// Copies what the runs still have beyond `done` bytes: the longer ones' rest by `copy`, less than a stride by memcpy.
inline void finish_runs(Run* runs, std::size_t count, std::size_t done, CopyRunsFn copy) {
  for (Run* run = runs; run != runs + count; ++run) {
    run->dst += done, run->src += done, run->n -= done;
    if (run->n >= kStride) {
      copy(run, 1);
    } else {
      std::memcpy(run->dst, run->src, run->n);
    }
  }
}

__attribute__((target("avx512f"))) inline void stream_copy_avx512(Run* runs, std::size_t count) {
  const std::size_t common = common_bytes(runs, count, 64);
  for (std::size_t at = 0; at < common; at += kStride) {
    for (std::size_t k = 0; k < count; ++k) {
      const std::byte* src = runs[k].src + at;
      std::byte* dst = runs[k].dst + at;
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
  finish_runs(runs, count, common, &stream_copy_avx512);
}

__attribute__((target("avx2"))) inline void stream_copy_avx2(Run* runs, std::size_t count) {
  const std::size_t common = common_bytes(runs, count, 32);
  for (std::size_t at = 0; at < common; at += kStride) {
    for (std::size_t k = 0; k < count; ++k) {
      for (std::size_t i = at; i < at + kStride; i += 64) {
        const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(runs[k].src + i));
        const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(runs[k].src + i + 32));
        _mm256_stream_si256(reinterpret_cast<__m256i*>(runs[k].dst + i), a);
        _mm256_stream_si256(reinterpret_cast<__m256i*>(runs[k].dst + i + 32), b);
      }
    }
  }
  finish_runs(runs, count, common, &stream_copy_avx2);
}

}  // namespace detail
#endif

// The widest streaming copy this CPU has, or plain_copy where it has none.
inline CopyRunsFn stream_copy() {
#if defined(SEMKV_X86)
  static const CopyRunsFn chosen = __builtin_cpu_supports("avx512f") ? &detail::stream_copy_avx512
                                   : __builtin_cpu_supports("avx2")  ? &detail::stream_copy_avx2
                                                                     : &plain_copy;
  return chosen;
#else
  return &plain_copy;
#endif
}

// Makes streaming stores visible to whoever synchronises with this thread afterwards.
inline void stream_fence() {
#if defined(SEMKV_X86)
  _mm_sfence();
#endif
}

}  // namespace semkv
