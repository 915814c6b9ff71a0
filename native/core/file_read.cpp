// SPDX-License-Identifier: Apache-2.0
#include "file_read.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace semkv {

namespace {

#ifdef O_DIRECT
constexpr int kDirect = O_DIRECT;
#else
constexpr int kDirect = 0;
#endif

bool suits_direct(const std::byte* into, std::uint64_t wanted, std::uint64_t skip) {
  static const auto page = static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
  return skip == 0 && wanted % page == 0 && reinterpret_cast<std::uintptr_t>(into) % page == 0;
}

class Descriptor {
 public:
  Descriptor(const char* path, int flags) {
    do {
      number_ = open(path, flags);
    } while (number_ < 0 && errno == EINTR);
  }
  ~Descriptor() {
    if (number_ >= 0) close(number_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int number() const { return number_; }

 private:
  int number_ = -1;
};

}  // namespace

FileRead read_file(const char* path, std::byte* into, std::uint64_t wanted, std::uint64_t skip, bool direct,
                   std::uint64_t at_once) {
  FileRead read;
  const int flags = O_RDONLY | O_CLOEXEC | (direct && suits_direct(into, wanted, skip) ? kDirect : 0);
  const Descriptor file(path, flags);
  struct stat about;
  if (file.number() < 0 || fstat(file.number(), &about) != 0) {
    read.error = errno;
    return read;
  }
  read.size = static_cast<std::int64_t>(about.st_size) - static_cast<std::int64_t>(skip);
  if (read.size != static_cast<std::int64_t>(wanted)) return read;
  while (read.done < wanted) {
    const auto ask = static_cast<std::size_t>(std::min(wanted - read.done, std::max<std::uint64_t>(1, at_once)));
    const ssize_t got = pread(file.number(), into + read.done, ask, static_cast<off_t>(skip + read.done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) read.error = errno;
    if (got <= 0) break;
    read.done += static_cast<std::uint64_t>(got);
  }
  return read;
}

}  // namespace semkv
