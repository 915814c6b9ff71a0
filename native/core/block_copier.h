// SPDX-License-Identifier: Apache-2.0
// Moves whole blocks between paged KV planes and one contiguous object.
//
// A plane is memory whose block i begins at base + i * stride and has `bytes` bytes (stride >= bytes, 64-bit). The
// object is [plane][block] raw bytes, in the order the planes were given. Ids are checked before a byte is written.
// Thread-safe: the copier is immutable. Two calls that write the same memory are the caller's to keep apart.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace semkv {

struct Plane {
  std::byte* base;
  std::uint64_t stride;
  std::uint64_t bytes;
  std::int64_t blocks;
};

enum class Direction { gather, scatter };

// How the bytes travel: memcpy, streaming stores, or the choice by size.
enum class Stores { automatic, plain, streaming };

// Below this the object may well be read again from cache, so that streaming past it would cost more than it saves.
inline constexpr std::uint64_t kStreamFrom = std::uint64_t{1} << 20;

inline bool streams(Stores stores, std::uint64_t bytes) {
  return stores == Stores::streaming || (stores == Stores::automatic && bytes >= kStreamFrom);
}

class BlockCopier {
 public:
  explicit BlockCopier(std::vector<Plane> planes);

  std::uint64_t bytes_per_block() const { return bytes_per_block_; }
  std::int64_t blocks() const { return blocks_; }
  std::size_t planes() const { return planes_.size(); }

  // Object bytes for n blocks; throws std::overflow_error beyond 64 bits.
  std::uint64_t object_bytes(std::uint64_t n) const;

  // Copies ids[skip:] between pages and the object, which holds all ids.size() blocks. Throws std::out_of_range on an
  // id outside [0, blocks) or skip > ids.size(), std::length_error when the object is too small.
  void copy(Direction direction, std::span<const std::int64_t> ids, std::byte* object, std::uint64_t object_size,
            std::size_t skip, unsigned threads, Stores stores) const;

 private:
  std::vector<Plane> planes_;
  std::uint64_t bytes_per_block_ = 0;
  std::int64_t blocks_ = 0;
};

// Throws std::out_of_range naming the first id outside [0, blocks) and its position.
void check_ids(std::span<const std::int64_t> ids, std::int64_t blocks);

// The block ids of slots[start:end] when whole blocks of block_size tokens are meant: one slot per block is read, the
// first, which must stand on a block boundary. Throws std::out_of_range / std::invalid_argument with position and
// value.
std::vector<std::int64_t> block_ids(std::span<const std::int64_t> slots, std::int64_t start, std::int64_t end,
                                    std::int64_t block_size);

}  // namespace semkv
