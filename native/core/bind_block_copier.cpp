// SPDX-License-Identifier: Apache-2.0
// Python face of BlockCopier. Every copy releases the GIL. C++ exceptions become IndexError (out_of_range), ValueError.
#include <nanobind/ndarray.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"
#include "block_copier.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace semkv {

namespace {

using Ids = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using PlaneArgs = std::tuple<std::uintptr_t, std::uint64_t, std::uint64_t, std::int64_t>;

std::span<const std::int64_t> view(const Ids& ids) { return {ids.data(), ids.size()}; }

void copy_slots(const BlockCopier& self, Direction direction, const Ids& slots, std::int64_t start, std::int64_t end,
                std::int64_t block_size, std::uintptr_t object, std::uint64_t object_size, std::size_t skip,
                unsigned threads, Stores stores) {
  const auto all = view(slots);
  nb::gil_scoped_release unlocked;
  const std::vector<std::int64_t> ids = block_ids(all, start, end, block_size);
  self.copy(direction, ids, reinterpret_cast<std::byte*>(object), object_size, skip, threads, stores);
}

void copy_ids(const BlockCopier& self, Direction direction, const Ids& ids, std::uintptr_t object,
              std::uint64_t object_size, std::size_t skip, unsigned threads, Stores stores) {
  const std::vector<std::int64_t> checked(ids.data(), ids.data() + ids.size());  // ours: nobody alters it midway
  nb::gil_scoped_release unlocked;
  self.copy(direction, checked, reinterpret_cast<std::byte*>(object), object_size, skip, threads, stores);
}

}  // namespace

void bind_block_copier(nb::module_& m) {
  nb::enum_<Direction>(m, "Direction").value("gather", Direction::gather).value("scatter", Direction::scatter);
  nb::enum_<Stores>(m, "Stores")
      .value("automatic", Stores::automatic)
      .value("plain", Stores::plain)
      .value("streaming", Stores::streaming);
  nb::class_<BlockCopier>(
      m, "BlockCopier",
      "Moves whole blocks between paged planes and one contiguous [plane][block] object.\n\n"
      "planes: (base address, block stride in bytes, block bytes, number of blocks) each. The caller "
      "keeps the memory alive.")
      .def(
          "__init__",
          [](BlockCopier* self, const std::vector<PlaneArgs>& args) {
            std::vector<Plane> planes;
            planes.reserve(args.size());
            for (const auto& [base, stride, bytes, blocks] : args) {
              planes.push_back({reinterpret_cast<std::byte*>(base), stride, bytes, blocks});
            }
            new (self) BlockCopier(std::move(planes));
          },
          "planes"_a)
      .def_prop_ro("bytes_per_block", &BlockCopier::bytes_per_block)
      .def_prop_ro("blocks", &BlockCopier::blocks)
      .def_prop_ro("planes", &BlockCopier::planes)
      .def("object_bytes", &BlockCopier::object_bytes, "blocks"_a)
      .def("copy_slots", &copy_slots, "direction"_a, "slots"_a, "start"_a, "end"_a, "block_size"_a, "object"_a,
           "object_size"_a, "skip"_a = 0, "threads"_a = 1, "stores"_a = Stores::automatic,
           "Copies the whole blocks of slots[start:end], less the first `skip`; slots are checked one per block.")
      .def("copy_ids", &copy_ids, "direction"_a, "ids"_a, "object"_a, "object_size"_a, "skip"_a = 0, "threads"_a = 1,
           "stores"_a = Stores::automatic, "Copies blocks ids[skip:]; the object holds all of ids.");
  m.def(
      "block_ids",
      [](const Ids& slots, std::int64_t start, std::int64_t end, std::int64_t block_size) {
        return block_ids(view(slots), start, end, block_size);
      },
      "slots"_a, "start"_a, "end"_a, "block_size"_a,
      "The blocks of slots[start:end]; each block's first slot must stand on a block boundary.");
}

}  // namespace semkv
