// SPDX-License-Identifier: Apache-2.0
#include "block_copier.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

#include "parallel.h"
#include "run_batch.h"

namespace semkv {

namespace {

// Copies blocks [from, to) of one plane. Neighbouring ids of a tight plane are one copy.
void copy_plane(const Plane& plane, Direction direction, std::span<const std::int64_t> ids, std::byte* segment,
                std::size_t from, std::size_t to, RunBatch& batch) {
  const bool tight = plane.stride == plane.bytes;
  for (std::size_t i = from; i < to;) {
    std::size_t run = 1;
    if (tight) {
      while (i + run < to && ids[i + run] == ids[i] + static_cast<std::int64_t>(run)) ++run;
    }
    std::byte* page = plane.base + static_cast<std::uint64_t>(ids[i]) * plane.stride;
    std::byte* object = segment + i * plane.bytes;
    if (direction == Direction::gather) {
      batch.add(object, page, run * plane.bytes);
    } else {
      batch.add(page, object, run * plane.bytes);
    }
    i += run;
  }
}

}  // namespace

BlockCopier::BlockCopier(std::vector<Plane> planes) : planes_(std::move(planes)) {
  if (planes_.empty()) throw std::invalid_argument("no planes: a copier needs at least one");
  blocks_ = planes_.front().blocks;
  for (std::size_t i = 0; i < planes_.size(); ++i) {
    const Plane& plane = planes_[i];
    const std::string where = "plane " + std::to_string(i) + ": ";
    if (plane.base == nullptr && plane.blocks != 0) throw std::invalid_argument(where + "null base address");
    if (plane.bytes == 0) throw std::invalid_argument(where + "a block of 0 bytes");
    if (plane.blocks < 0) throw std::invalid_argument(where + "negative block count");
    if (plane.stride < plane.bytes && plane.blocks > 1) {
      throw std::invalid_argument(where + "stride " + std::to_string(plane.stride) + " is below the block's " +
                                  std::to_string(plane.bytes) + " bytes, so blocks overlap");
    }
    blocks_ = std::min(blocks_, plane.blocks);
    bytes_per_block_ += plane.bytes;
  }
}

std::uint64_t BlockCopier::object_bytes(std::uint64_t n) const {
  if (n != 0 && bytes_per_block_ > std::numeric_limits<std::uint64_t>::max() / n) {
    throw std::overflow_error("object size beyond 64 bits");
  }
  return n * bytes_per_block_;
}

void BlockCopier::copy(Direction direction, std::span<const std::int64_t> ids, std::byte* object,
                       std::uint64_t object_size, std::size_t skip, unsigned threads, Stores stores) const {
  const std::size_t n = ids.size();
  if (skip > n) {
    throw std::out_of_range("skip " + std::to_string(skip) + " is more than the " + std::to_string(n) +
                            " blocks given");
  }
  const std::uint64_t need = object_bytes(n);
  if (object_size < need) {
    throw std::length_error("the object has " + std::to_string(object_size) + " bytes, " + std::to_string(n) +
                            " blocks need " + std::to_string(need));
  }
  check_ids(ids, blocks_);
  if (skip == n) return;

  const std::uint64_t bytes = (n - skip) * bytes_per_block_;
  const bool streaming = streams(stores, bytes);

  // Work is cut along (plane, block) laid end to end, so that few planes and many blocks divide as well as the reverse.
  const std::size_t per_plane = n - skip;
  const std::size_t items = planes_.size() * per_plane;
  auto work = [&](std::size_t first, std::size_t last) {
    RunBatch batch(streaming);
    while (first < last) {
      const std::size_t p = first / per_plane;
      const std::size_t from = first % per_plane;
      const std::size_t to = std::min(per_plane, from + (last - first));
      std::uint64_t offset = 0;
      for (std::size_t q = 0; q < p; ++q) offset += planes_[q].bytes * n;
      copy_plane(planes_[p], direction, ids, object + offset, skip + from, skip + to, batch);
      first += to - from;
    }
    batch.finish();
  };

  divide(items, bytes, threads, work);
}

void check_ids(std::span<const std::int64_t> ids, std::int64_t blocks) {
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] < 0 || ids[i] >= blocks) {
      throw std::out_of_range("block id " + std::to_string(ids[i]) + " at position " + std::to_string(i) +
                              " is outside [0, " + std::to_string(blocks) + ")");
    }
  }
}

std::vector<std::int64_t> block_ids(std::span<const std::int64_t> slots, std::int64_t start, std::int64_t end,
                                    std::int64_t block_size) {
  if (block_size <= 0) throw std::invalid_argument("block_size " + std::to_string(block_size) + " is not positive");
  if (start < 0 || end < start || static_cast<std::uint64_t>(end) > slots.size()) {
    throw std::out_of_range("tokens [" + std::to_string(start) + ", " + std::to_string(end) + ") are outside the " +
                            std::to_string(slots.size()) + " slots given");
  }
  std::vector<std::int64_t> ids;
  ids.reserve(static_cast<std::size_t>((end - start + block_size - 1) / block_size));
  for (std::int64_t i = start; i < end; i += block_size) {
    const std::int64_t slot = slots[static_cast<std::size_t>(i)];
    if (slot < 0 || slot % block_size != 0) {
      throw std::invalid_argument("slot " + std::to_string(slot) + " of token " + std::to_string(i) +
                                  " does not begin a block of " + std::to_string(block_size) + " tokens");
    }
    ids.push_back(slot / block_size);
  }
  return ids;
}

}  // namespace semkv
