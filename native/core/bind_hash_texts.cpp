// SPDX-License-Identifier: Apache-2.0
// Reads chunk hashes back from the texts that LMCache prints (`f"{h:x}"`). Holds the GIL; runs no Python code.
#include <nanobind/nanobind.h>

#include <array>
#include <cstdint>

#include "bindings.h"

namespace nb = nanobind;

namespace semkv {

namespace {

constexpr std::uint8_t kNone = 0xFF;
constexpr Py_ssize_t kDigits = 16;

constexpr std::array<std::uint8_t, 256> make_digits() {
  std::array<std::uint8_t, 256> digits{};
  digits.fill(kNone);
  for (int i = 0; i < 10; ++i) digits['0' + i] = static_cast<std::uint8_t>(i);
  for (int i = 0; i < 6; ++i) digits['a' + i] = static_cast<std::uint8_t>(10 + i);
  return digits;
}

constexpr auto kValues = make_digits();

// A sign or none, then 1 to 16 lower-case hex digits that fit into 64 bits with the sign; false for anything else.
bool parse(PyObject* text, std::int64_t& value) {
  if (!PyUnicode_CheckExact(text) || !PyUnicode_IS_COMPACT_ASCII(text)) return false;
  const auto* at = static_cast<const std::uint8_t*>(PyUnicode_DATA(text));
  Py_ssize_t left = PyUnicode_GET_LENGTH(text);
  const bool negative = left > 0 && *at == '-';
  at += negative;
  left -= negative;
  if (left < 1 || left > kDigits) return false;
  std::uint64_t magnitude = 0;
  std::uint8_t seen = 0;  // no digit has one of the upper four bits
  for (; left > 0; --left) {
    const std::uint8_t digit = kValues[*at++];
    seen |= digit;
    magnitude = magnitude << 4 | (digit & 0xF);
  }
  if (seen > 0xF || magnitude > (std::uint64_t{1} << 63) - !negative) return false;
  value = static_cast<std::int64_t>(negative ? 0 - magnitude : magnitude);
  return true;
}

nb::object hash_ints(nb::handle texts) {
  const bool list = PyList_CheckExact(texts.ptr());
  if (!list && !PyTuple_CheckExact(texts.ptr())) return nb::none();
  const Py_ssize_t count = Py_SIZE(texts.ptr());
  auto values = nb::steal<nb::object>(PyTuple_New(count));
  if (!values.is_valid()) nb::raise_python_error();
  for (Py_ssize_t i = 0; i < count; ++i) {
    // Looked at anew each time: what allocates may run the garbage collector, and whatever it runs may alter a list.
    if (Py_SIZE(texts.ptr()) != count) return nb::none();
    std::int64_t value = 0;
    if (!parse(PySequence_Fast_ITEMS(texts.ptr())[i], value)) return nb::none();
    PyObject* made = PyLong_FromLongLong(value);
    if (made == nullptr) nb::raise_python_error();
    PyTuple_SET_ITEM(values.ptr(), i, made);
  }
  return values;
}

}  // namespace

void bind_hash_texts(nb::module_& m) {
  m.def("hash_ints", &hash_ints, nb::arg("texts").none(),
        "The chunk hashes of a list or tuple of LMCache's texts, as signed ints; None where one is not of that form.");
}

}  // namespace semkv
