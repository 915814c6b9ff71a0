// SPDX-License-Identifier: Apache-2.0
// Reads one whole file into memory that is there already.
#pragma once

#include <cstddef>
#include <cstdint>

namespace semkv {

// What came of it. `size` is what the file has behind `skip`; nothing is read unless that is what was wanted. `done`
// bytes were read; fewer than wanted if the file ended early. `error` is the errno of the call that failed, or 0.
struct FileRead {
  std::int64_t size = 0;
  std::uint64_t done = 0;
  int error = 0;
};

// Fills `into` with the `wanted` bytes behind `skip` bytes of the file; at most `at_once` bytes are asked for in one
// request (at least 1). `direct` opens with O_DIRECT where address and length allow it. The file is closed again,
// whatever happens. Any number of threads.
FileRead read_file(const char* path, std::byte* into, std::uint64_t wanted, std::uint64_t skip, bool direct,
                   std::uint64_t at_once);

}  // namespace semkv
