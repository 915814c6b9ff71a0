// SPDX-License-Identifier: Apache-2.0
// Python face of read_file. The GIL is given up once, for opening, reading and closing together: between them a thread
// that reads would otherwise wait for whoever computes.
#include <nanobind/nanobind.h>

#include <cerrno>

#include "bindings.h"
#include "file_read.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace semkv {

namespace {

class Writable {
 public:
  explicit Writable(nb::handle of) {
    if (PyObject_GetBuffer(of.ptr(), &view_, PyBUF_CONTIG) != 0) nb::raise_python_error();
  }
  ~Writable() { PyBuffer_Release(&view_); }
  Writable(const Writable&) = delete;
  Writable& operator=(const Writable&) = delete;
  std::byte* data() const { return static_cast<std::byte*>(view_.buf); }
  std::uint64_t size() const { return static_cast<std::uint64_t>(view_.len); }

 private:
  Py_buffer view_{};
};

nb::tuple read_into(nb::str path, nb::handle buffer, std::uint64_t skip, bool direct, std::uint64_t at_once) {
  PyObject* encoded = nullptr;
  if (PyUnicode_FSConverter(path.ptr(), &encoded) == 0) nb::raise_python_error();
  const auto name = nb::steal<nb::object>(encoded);
  const Writable into(buffer);
  FileRead read;
  {
    nb::gil_scoped_release unlocked;
    read = read_file(PyBytes_AS_STRING(name.ptr()), into.data(), into.size(), skip, direct, at_once);
  }
  if (read.error != 0) {
    errno = read.error;
    PyErr_SetFromErrnoWithFilenameObject(PyExc_OSError, path.ptr());
    nb::raise_python_error();
  }
  return nb::make_tuple(read.size, read.done);
}

}  // namespace

void bind_file_read(nb::module_& m) {
  m.def("read_file", &read_into, "path"_a, "buffer"_a, "skip"_a, "direct"_a, "at_once"_a,
        "Fills a writable buffer from a file: what the file has behind `skip`, and the bytes read. Nothing is read "
        "unless the two sizes agree. OSError as the kernel gives it.");
}

}  // namespace semkv
