// SPDX-License-Identifier: Apache-2.0
// One contiguous copy, by plain memcpy or by streaming stores that leave the caches alone.
// Callers choose; a streaming copy must be followed by stream_fence() before another thread is told of the data.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#define SEMKV_X86 1
#endif

namespace semkv {

using CopyFn = void (*)(std::byte* dst, const std::byte* src, std::size_t n);

inline void plain_copy(std::byte* dst, const std::byte* src, std::size_t n) { std::memcpy(dst, src, n); }

#if defined(SEMKV_X86)
namespace detail {

// Bytes until dst is on a `width` boundary, at most n.
inline std::size_t head_bytes(const std::byte* dst, std::size_t n, std::size_t width) {
  const std::size_t head = (width - reinterpret_cast<std::uintptr_t>(dst) % width) % width;
  return head < n ? head : n;
}

__attribute__((target("avx512f"))) inline void stream_copy_avx512(std::byte* dst, const std::byte* src, std::size_t n) {
  const std::size_t head = head_bytes(dst, n, 64);
  std::memcpy(dst, src, head);
  dst += head, src += head, n -= head;
  for (; n >= 256; dst += 256, src += 256, n -= 256) {
    const __m512i a = _mm512_loadu_si512(src);
    const __m512i b = _mm512_loadu_si512(src + 64);
    const __m512i c = _mm512_loadu_si512(src + 128);
    const __m512i d = _mm512_loadu_si512(src + 192);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(dst), a);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + 64), b);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + 128), c);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + 192), d);
  }
  std::memcpy(dst, src, n);
}

__attribute__((target("avx2"))) inline void stream_copy_avx2(std::byte* dst, const std::byte* src, std::size_t n) {
  const std::size_t head = head_bytes(dst, n, 32);
  std::memcpy(dst, src, head);
  dst += head, src += head, n -= head;
  for (; n >= 128; dst += 128, src += 128, n -= 128) {
    const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src));
    const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + 32));
    const __m256i c = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + 64));
    const __m256i d = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + 96));
    _mm256_stream_si256(reinterpret_cast<__m256i*>(dst), a);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(dst + 32), b);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(dst + 64), c);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(dst + 96), d);
  }
  std::memcpy(dst, src, n);
}

}  // namespace detail
#endif

// The widest streaming copy this CPU has, or plain_copy where it has none.
inline CopyFn stream_copy() {
#if defined(SEMKV_X86)
  static const CopyFn chosen = __builtin_cpu_supports("avx512f") ? &detail::stream_copy_avx512
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
