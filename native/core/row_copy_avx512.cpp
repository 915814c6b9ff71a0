// SPDX-License-Identifier: Apache-2.0
// Compiled for AVX-512 alone (see CMakeLists.txt), called only where the CPU has it.
#include <immintrin.h>

#include "row_copy.h"

namespace semkv::detail {

void stream_rows_avx512(const RowGrid* grids, std::size_t count) {
  const RowGrid& g = grids[0];
  for (std::uint64_t t = 0; t < g.tokens; ++t) {
    for (std::size_t k = 0; k < count; ++k) {
      for (std::uint64_t h = 0; h < g.heads; ++h) {
        std::byte* dst = grids[k].dst + t * g.dst_token + h * g.dst_head;
        const std::byte* src = grids[k].src + t * g.src_token + h * g.src_head;
        for (std::uint64_t i = 0; i < g.piece; i += 64) {
          _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + i), _mm512_loadu_si512(src + i));
        }
      }
    }
  }
}

}  // namespace semkv::detail
