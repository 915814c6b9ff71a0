// SPDX-License-Identifier: Apache-2.0
#include "row_copier.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

#include "parallel.h"
#include "run_batch.h"

namespace semkv {

RowCopier::RowCopier(std::vector<RowPlane> planes, std::uint64_t block_size, std::uint64_t bytes_per_token)
    : planes_(std::move(planes)), block_size_(block_size), bytes_per_token_(bytes_per_token) {
  if (planes_.empty()) throw std::invalid_argument("no planes: a copier needs at least one");
  if (block_size_ == 0) throw std::invalid_argument("block_size 0");
  blocks_ = planes_.front().blocks;
  for (std::size_t i = 0; i < planes_.size(); ++i) {
    const RowPlane& p = planes_[i];
    const std::string where = "plane " + std::to_string(i) + ": ";
    if (p.base == nullptr && p.blocks != 0) throw std::invalid_argument(where + "null base address");
    if (p.blocks < 0) throw std::invalid_argument(where + "negative block count");
    if (p.heads == 0 || p.head_bytes == 0) throw std::invalid_argument(where + "a row of 0 bytes");
    if (p.column + p.heads * p.head_bytes > p.row || p.before + p.row > bytes_per_token_) {
      throw std::invalid_argument(where + "its columns lie outside the object's rows");
    }
    blocks_ = std::min(blocks_, p.blocks);
  }
}

void RowCopier::check_object(std::uint64_t tokens, std::uint64_t object_size, std::uint64_t skip) const {
  if (skip > tokens) {
    throw std::out_of_range("skip " + std::to_string(skip) + " is more than the " + std::to_string(tokens) +
                            " tokens given");
  }
  if (tokens != 0 && bytes_per_token_ > std::numeric_limits<std::uint64_t>::max() / tokens) {
    throw std::overflow_error("object size beyond 64 bits");
  }
  if (object_size < tokens * bytes_per_token_) {
    throw std::length_error("the object has " + std::to_string(object_size) + " bytes, " + std::to_string(tokens) +
                            " tokens need " + std::to_string(tokens * bytes_per_token_));
  }
}

void RowCopier::copy_run(const RowPlane& p, Direction direction, std::byte* object, std::uint64_t tokens,
                         std::uint64_t at, std::uint64_t count, std::int64_t block, std::uint64_t offset,
                         RunBatch& batch) const {
  std::byte* page = p.base + static_cast<std::uint64_t>(block) * p.block_stride + offset * p.token_stride;
  std::byte* rows = object + p.before * tokens + at * p.row + p.column;
  std::uint64_t heads = p.heads, piece = p.head_bytes, page_token = p.token_stride, row_token = p.row;
  if (p.head_stride == piece) piece *= heads, heads = 1;  // a token's heads lie together
  if (heads == 1 && page_token == piece && row_token == piece) {
    return direction == Direction::gather ? batch.add(rows, page, count * piece) : batch.add(page, rows, count * piece);
  }
  const RowGrid grid = direction == Direction::gather
                           ? RowGrid{rows, page, count, heads, piece, row_token, page_token, piece, p.head_stride}
                           : RowGrid{page, rows, count, heads, piece, page_token, row_token, p.head_stride, piece};
  batch.add(grid);
}

void RowCopier::copy_blocks(Direction direction, std::span<const std::int64_t> ids, std::uint64_t tokens,
                            std::byte* object, std::uint64_t object_size, std::uint64_t skip, unsigned threads,
                            Stores stores) const {
  check_object(tokens, object_size, skip);
  const std::uint64_t need = tokens / block_size_ + (tokens % block_size_ != 0 ? 1 : 0);
  if (ids.size() != need) {
    throw std::invalid_argument(std::to_string(tokens) + " tokens are " + std::to_string(need) + " blocks of " +
                                std::to_string(block_size_) + ", but " + std::to_string(ids.size()) + " ids are given");
  }
  check_ids(ids, blocks_);
  if (skip == tokens) return;

  const std::uint64_t bytes = (tokens - skip) * bytes_per_token_;
  const bool streaming = streams(stores, bytes);
  const std::uint64_t first_block = skip / block_size_;
  const std::uint64_t per_plane = need - first_block;
  divide(planes_.size() * per_plane, bytes, threads, [&](std::size_t first, std::size_t last) {
    RunBatch batch(streaming);
    for (; first < last; ++first) {
      const std::uint64_t block = first_block + first % per_plane;
      const std::uint64_t at = std::max(block * block_size_, skip);
      const std::uint64_t end = std::min((block + 1) * block_size_, tokens);
      copy_run(planes_[first / per_plane], direction, object, tokens, at, end - at, ids[block],
               at - block * block_size_, batch);
    }
    batch.finish();
  });
}

void RowCopier::copy_slots(Direction direction, std::span<const std::int64_t> slots, std::byte* object,
                           std::uint64_t object_size, std::uint64_t skip, unsigned threads, Stores stores) const {
  const std::uint64_t tokens = slots.size();
  check_object(tokens, object_size, skip);
  const auto size = static_cast<std::int64_t>(block_size_);
  for (std::size_t i = 0; i < tokens; ++i) {
    if (slots[i] < -1 || (slots[i] >= 0 && slots[i] / size >= blocks_)) {
      throw std::out_of_range("slot " + std::to_string(slots[i]) + " at position " + std::to_string(i) +
                              " is outside [-1, " + std::to_string(blocks_ * size) + ")");
    }
  }
  if (skip == tokens) return;

  const std::uint64_t bytes = (tokens - skip) * bytes_per_token_;
  const bool streaming = streams(stores, bytes);
  divide(planes_.size(), bytes, threads, [&](std::size_t first, std::size_t last) {
    RunBatch batch(streaming);
    for (; first < last; ++first) {
      for (std::uint64_t at = skip; at < tokens;) {
        if (slots[at] < 0) {
          ++at;
          continue;
        }
        // Slots that follow one another inside a block are one run.
        std::uint64_t run = 1;
        while (at + run < tokens && slots[at + run] == slots[at] + static_cast<std::int64_t>(run) &&
               slots[at + run] / size == slots[at] / size) {
          ++run;
        }
        copy_run(planes_[first], direction, object, tokens, at, run, slots[at] / size,
                 static_cast<std::uint64_t>(slots[at] % size), batch);
        at += run;
      }
    }
    batch.finish();
  });
}

}  // namespace semkv
