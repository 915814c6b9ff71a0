// SPDX-License-Identifier: Apache-2.0
// Copies a grid of equal pieces, tokens by heads, between two strided places. This header is shared with a file
// compiled for AVX-512 and must stay free of inline code that other files use too.
#pragma once

#include <cstddef>
#include <cstdint>

namespace semkv {

struct RowGrid {
  std::byte* dst;
  const std::byte* src;
  std::uint64_t tokens;
  std::uint64_t heads;
  std::uint64_t piece;  // bytes of one head of one token
  std::uint64_t dst_token;
  std::uint64_t src_token;
  std::uint64_t dst_head;
  std::uint64_t src_head;
};

using RowCopyFn = void (*)(const RowGrid&);

void copy_rows(const RowGrid& grid);

// Streaming stores, a piece of each grid in turn (see run_batch.h). The grids differ in dst and src alone. Pieces must
// be multiples of 64 bytes and dst with its strides 64-byte aligned, else as copy_rows.
void stream_rows(const RowGrid* grids, std::size_t count);

namespace detail {
#if defined(SEMKV_HAVE_AVX512_FILE)
void stream_rows_avx512(const RowGrid* grids, std::size_t count);
#endif
}  // namespace detail

}  // namespace semkv
