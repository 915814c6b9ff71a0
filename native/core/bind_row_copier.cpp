// SPDX-License-Identifier: Apache-2.0
// Python face of RowCopier. Every copy releases the GIL.
#include <nanobind/ndarray.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"
#include "row_copier.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace semkv {

namespace {

using Ids = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using RowPlaneArgs = std::tuple<std::uintptr_t, std::int64_t, std::uint64_t, std::uint64_t, std::uint64_t,
                                std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t>;

// A copy of our own: nobody alters it between the check and the use.
std::vector<std::int64_t> own(const Ids& ids) { return {ids.data(), ids.data() + ids.size()}; }

}  // namespace

void bind_row_copier(nb::module_& m) {
  nb::class_<RowCopier>(
      m, "RowCopier",
      "Moves tokens between paged planes and one contiguous object of token rows.\n\n"
      "planes: (base address, blocks, heads, head bytes, block stride, token stride, head stride, row "
      "bytes of earlier segments, row bytes of this segment, column in the row) each, in bytes.")
      .def(
          "__init__",
          [](RowCopier* self, const std::vector<RowPlaneArgs>& args, std::uint64_t block_size,
             std::uint64_t bytes_per_token) {
            std::vector<RowPlane> planes;
            planes.reserve(args.size());
            for (const auto& [base, blocks, heads, head, block, token, stride, before, row, column] : args) {
              planes.push_back(
                  {reinterpret_cast<std::byte*>(base), blocks, heads, head, block, token, stride, before, row, column});
            }
            new (self) RowCopier(std::move(planes), block_size, bytes_per_token);
          },
          "planes"_a, "block_size"_a, "bytes_per_token"_a)
      .def_prop_ro("bytes_per_token", &RowCopier::bytes_per_token)
      .def_prop_ro("block_size", &RowCopier::block_size)
      .def_prop_ro("blocks", &RowCopier::blocks)
      .def_prop_ro("planes", &RowCopier::planes)
      .def(
          "copy_blocks",
          [](const RowCopier& self, Direction direction, const Ids& ids, std::uint64_t tokens, std::uintptr_t object,
             std::uint64_t object_size, std::uint64_t skip, unsigned threads, Stores stores) {
            const auto checked = own(ids);
            nb::gil_scoped_release unlocked;
            self.copy_blocks(direction, checked, tokens, reinterpret_cast<std::byte*>(object), object_size, skip,
                             threads, stores);
          },
          "direction"_a, "ids"_a, "tokens"_a, "object"_a, "object_size"_a, "skip"_a = 0, "threads"_a = 1,
          "stores"_a = Stores::automatic, "Tokens [skip, tokens) of whole blocks; the last may be in part.")
      .def(
          "copy_slots",
          [](const RowCopier& self, Direction direction, const Ids& slots, std::uintptr_t object,
             std::uint64_t object_size, std::uint64_t skip, unsigned threads, Stores stores) {
            const auto checked = own(slots);
            nb::gil_scoped_release unlocked;
            self.copy_slots(direction, checked, reinterpret_cast<std::byte*>(object), object_size, skip, threads,
                            stores);
          },
          "direction"_a, "slots"_a, "object"_a, "object_size"_a, "skip"_a = 0, "threads"_a = 1,
          "stores"_a = Stores::automatic, "Each token where its slot says; -1 is a token without a place.");
}

}  // namespace semkv
