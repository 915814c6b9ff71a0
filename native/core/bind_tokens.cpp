// SPDX-License-Identifier: Apache-2.0
// Reads the tokens of a prompt from a Python list, for chain hashes. Holds the GIL; runs no Python code.
#include <nanobind/nanobind.h>

#include <bit>
#include <cstdint>

#include "bindings.h"
#if PY_VERSION_HEX < 0x030B0000
#include <longintrepr.h>
#endif

namespace nb = nanobind;

namespace semkv {

namespace {

// A list's objects lie all over the heap: this many ahead, the processor is told to fetch them.
constexpr Py_ssize_t kAhead = 32;

// The value of an int of one digit (or none), which every token of a vocabulary is; false for any other.
bool small_value(PyObject* item, std::uint32_t& value) {
  auto* number = reinterpret_cast<PyLongObject*>(item);
#if PY_VERSION_HEX >= 0x030C0000
  if (!PyUnstable_Long_IsCompact(number)) return false;
  const Py_ssize_t compact = PyUnstable_Long_CompactValue(number);
  value = static_cast<std::uint32_t>(compact);
  return true;
#else
  const auto digits = static_cast<std::size_t>(Py_SIZE(item));  // a negative one's is negative: very many here
  if (digits > 1) return false;
  value = digits == 0 ? 0 : static_cast<std::uint32_t>(number->ob_digit[0]);
  return true;
#endif
}

std::uint32_t little_endian(std::uint32_t value) {
  return std::endian::native == std::endian::little ? value : __builtin_bswap32(value);
}

nb::object token_bytes(nb::handle tokens) {
  const bool list = PyList_CheckExact(tokens.ptr());
  if (!list && !PyTuple_CheckExact(tokens.ptr())) return nb::none();
  const Py_ssize_t count = Py_SIZE(tokens.ptr());
  auto packed = nb::steal<nb::object>(PyBytes_FromStringAndSize(nullptr, count * 4));
  if (!packed.is_valid()) nb::raise_python_error();
  // Only now: what allocates may run the garbage collector, and whatever it runs may alter a list.
  if (Py_SIZE(tokens.ptr()) != count) return nb::none();
  PyObject* const* items = PySequence_Fast_ITEMS(tokens.ptr());
  auto* out = reinterpret_cast<std::uint32_t*>(PyBytes_AS_STRING(packed.ptr()));
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (i + kAhead < count) __builtin_prefetch(items[i + kAhead]);
    PyObject* item = items[i];
    if (!PyLong_CheckExact(item)) return nb::none();
    std::uint32_t value = 0;
    if (!small_value(item, value)) value = static_cast<std::uint32_t>(PyLong_AsUnsignedLongLongMask(item));
    out[i] = little_endian(value);
  }
  return packed;
}

}  // namespace

void bind_tokens(nb::module_& m) {
  m.def(
      "token_bytes", &token_bytes, nb::arg("tokens").none(),
      "The tokens of a list or tuple of plain ints as u32 little-endian (their low 32 bits); None for anything else.");
}

}  // namespace semkv
