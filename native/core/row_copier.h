// SPDX-License-Identifier: Apache-2.0
// Moves tokens between paged KV planes and one contiguous object of token rows.
//
// The object of T tokens is segments one after the other, each T rows of `row` bytes; a plane is a column of one
// segment, from byte `column` of its rows. Segments are K of layer 0, K of layer 1, ..., V of layer 0, ...: a plane
// names its segment by the row bytes of all segments before it. Pages may have heads or tokens first, and gaps between
// blocks. Thread-safe and checked as BlockCopier is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "block_copier.h"
#include "row_copy.h"

namespace semkv {

class RunBatch;

struct RowPlane {
  std::byte* base;
  std::int64_t blocks;
  std::uint64_t heads;
  std::uint64_t head_bytes;
  std::uint64_t block_stride;
  std::uint64_t token_stride;
  std::uint64_t head_stride;
  std::uint64_t before;  // row bytes of the segments before this one
  std::uint64_t row;     // row bytes of this segment
  std::uint64_t column;  // where in the row this plane begins
};

class RowCopier {
 public:
  RowCopier(std::vector<RowPlane> planes, std::uint64_t block_size, std::uint64_t bytes_per_token);

  std::uint64_t bytes_per_token() const { return bytes_per_token_; }
  std::uint64_t block_size() const { return block_size_; }
  std::int64_t blocks() const { return blocks_; }
  std::size_t planes() const { return planes_.size(); }

  // Tokens [skip, tokens) of an object of `tokens` tokens; token i is in block ids[i / block_size]. The last block may
  // be in part. Throws as BlockCopier::copy, and std::invalid_argument when ids are not as many as the tokens need.
  void copy_blocks(Direction direction, std::span<const std::int64_t> ids, std::uint64_t tokens, std::byte* object,
                   std::uint64_t object_size, std::uint64_t skip, unsigned threads, Stores stores) const;

  // As above, each token where its slot says (block * block_size + offset). A slot of -1 is a token without a place.
  void copy_slots(Direction direction, std::span<const std::int64_t> slots, std::byte* object,
                  std::uint64_t object_size, std::uint64_t skip, unsigned threads, Stores stores) const;

 private:
  void check_object(std::uint64_t tokens, std::uint64_t object_size, std::uint64_t skip) const;
  // Copies `count` tokens from token `at` of the object; they lie together in a page from `offset` on.
  void copy_run(const RowPlane& plane, Direction direction, std::byte* object, std::uint64_t tokens, std::uint64_t at,
                std::uint64_t count, std::int64_t block, std::uint64_t offset, RunBatch& batch) const;

  std::vector<RowPlane> planes_;
  std::uint64_t block_size_;
  std::uint64_t bytes_per_token_;
  std::int64_t blocks_ = 0;
};

}  // namespace semkv
