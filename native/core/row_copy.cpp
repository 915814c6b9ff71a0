// SPDX-License-Identifier: Apache-2.0
#include "row_copy.h"

#include <cstring>

namespace semkv {

namespace {

// A constant size lets the compiler copy in registers; a call of memcpy costs as much as copying a small piece.
template <std::uint64_t kPiece>
void copy_pieces(const RowGrid& g) {
  const std::uint64_t piece = kPiece == 0 ? g.piece : kPiece;
  for (std::uint64_t t = 0; t < g.tokens; ++t) {
    for (std::uint64_t h = 0; h < g.heads; ++h) {
      std::memcpy(g.dst + t * g.dst_token + h * g.dst_head, g.src + t * g.src_token + h * g.src_head, piece);
    }
  }
}

bool aligned(const RowGrid& g) {
  return (reinterpret_cast<std::uintptr_t>(g.dst) | g.piece | g.dst_token | g.dst_head) % 64 == 0;
}

}  // namespace

void copy_rows(const RowGrid& grid) {
  switch (grid.piece) {
    case 2:
      return copy_pieces<2>(grid);
    case 4:
      return copy_pieces<4>(grid);
    case 32:
      return copy_pieces<32>(grid);
    case 64:
      return copy_pieces<64>(grid);
    case 128:
      return copy_pieces<128>(grid);
    case 256:
      return copy_pieces<256>(grid);
    default:
      return copy_pieces<0>(grid);
  }
}

void stream_rows(const RowGrid* grids, std::size_t count) {
#if defined(SEMKV_HAVE_AVX512_FILE)
  static const bool available = __builtin_cpu_supports("avx512f");
  bool possible = available;
  for (std::size_t i = 0; i < count; ++i) possible = possible && aligned(grids[i]);
  if (possible) return detail::stream_rows_avx512(grids, count);
#endif
  for (std::size_t i = 0; i < count; ++i) copy_rows(grids[i]);
}

}  // namespace semkv
