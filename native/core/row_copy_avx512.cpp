// SPDX-License-Identifier: Apache-2.0
// Compiled for AVX-512 alone (see CMakeLists.txt), called only where the CPU has it.
#include <immintrin.h>

#include "row_copy.h"

namespace semkv::detail {

namespace {

void stream_piece(std::byte* dst, const std::byte* src, std::uint64_t piece) {
  for (std::uint64_t i = 0; i < piece; i += 64) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + i), _mm512_loadu_si512(src + i));
  }
}

}  // namespace

void stream_rows_avx512(const RowGrid* grids, std::size_t count) {
  const RowGrid& g = grids[0];
  // In the order of the source, so that it is read from its beginning to its end.
  const bool heads_first = g.src_head > g.src_token;
  const std::uint64_t outer = heads_first ? g.heads : g.tokens, inner = heads_first ? g.tokens : g.heads;
  const std::uint64_t src_outer = heads_first ? g.src_head : g.src_token,
                      dst_outer = heads_first ? g.dst_head : g.dst_token;
  const std::uint64_t src_inner = heads_first ? g.src_token : g.src_head,
                      dst_inner = heads_first ? g.dst_token : g.dst_head;
  for (std::uint64_t o = 0; o < outer; ++o) {
    for (std::uint64_t i = 0; i < inner; ++i) {
      for (std::size_t k = 0; k < count; ++k) {
        stream_piece(grids[k].dst + o * dst_outer + i * dst_inner, grids[k].src + o * src_outer + i * src_inner,
                     g.piece);
      }
    }
  }
}

}  // namespace semkv::detail
