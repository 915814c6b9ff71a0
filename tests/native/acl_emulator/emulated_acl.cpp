// SPDX-License-Identifier: Apache-2.0
// The part of Huawei's ACL runtime that torch_npu links to, on host memory, for tests without an NPU.
//
// A stream is a thread with a queue; copies, memsets, event records and event waits are queued on it in order. Device
// memory is host memory. There are no compute kernels: operators that would need one fail. What is proved on it is how
// streams, events and copies are used and in what order; nothing about speed or about CANN's own behaviour.
//
// EMULATED_ACL_GB_S slows asynchronous copies down to a bandwidth. EMULATED_ACL_TRACE names a file that gets a line for
// each asynchronous copy: stream, kind (1 host to device, 2 device to host, 3 on the device), bytes, start, end (ns).
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <thread>

namespace {

using Clock = std::chrono::steady_clock;

class Stream {
 public:
  Stream() : worker_([this] { run(); }) {}

  void push(std::function<void()> work) {
    {
      const std::lock_guard lock(mutex_);
      queue_.push_back(std::move(work));
    }
    filled_.notify_one();
  }

  void wait() {
    std::unique_lock lock(mutex_);
    idle_.wait(lock, [this] { return queue_.empty() && !busy_; });
  }

  bool done() {
    const std::lock_guard lock(mutex_);
    return queue_.empty() && !busy_;
  }

 private:
  [[noreturn]] void run() {
    std::unique_lock lock(mutex_);
    for (;;) {
      filled_.wait(lock, [this] { return !queue_.empty(); });
      auto work = std::move(queue_.front());
      queue_.pop_front();
      busy_ = true;
      lock.unlock();
      work();
      lock.lock();
      busy_ = false;
      if (queue_.empty()) idle_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable filled_, idle_;
  std::deque<std::function<void()>> queue_;
  bool busy_ = false;
  std::thread worker_;
};

struct Event {
  std::mutex mutex;
  std::condition_variable changed;
  std::uint64_t recorded = 0, done = 0;
  Clock::time_point at;

  bool reached(std::uint64_t number) {
    const std::lock_guard lock(mutex);
    return done >= number;
  }
};

// Streams live as long as the process: torch_npu keeps using handles until the very end.
std::mutex streams_mutex;
std::deque<Stream*> streams;

Stream* make_stream() {
  auto* stream = new Stream;
  const std::lock_guard lock(streams_mutex);
  streams.push_back(stream);
  return stream;
}

Stream* stream_of(void* handle) {
  static Stream* const default_stream = make_stream();
  return handle ? static_cast<Stream*>(handle) : default_stream;
}

std::mutex memory_mutex;
std::map<void*, std::size_t> blocks;
std::atomic<std::size_t> used{0};
thread_local std::int32_t device = 0;

void trace_copy(void* stream, int kind, std::size_t bytes, Clock::time_point start) {
  static FILE* const file =
      std::getenv("EMULATED_ACL_TRACE") ? std::fopen(std::getenv("EMULATED_ACL_TRACE"), "a") : nullptr;
  if (!file) return;
  const auto ns = [](Clock::time_point t) { return static_cast<long long>(t.time_since_epoch().count()); };
  std::fprintf(file, "%p %d %zu %lld %lld\n", stream, kind, bytes, ns(start), ns(Clock::now()));
  std::fflush(file);
}

std::chrono::nanoseconds duration_of(std::size_t bytes) {
  static const double gb_s = std::getenv("EMULATED_ACL_GB_S") ? std::atof(std::getenv("EMULATED_ACL_GB_S")) : 0;
  return std::chrono::nanoseconds(gb_s > 0 ? static_cast<long>(static_cast<double>(bytes) / gb_s) : 0);
}

constexpr int kOutOfMemory = 207001, kNoKernel = 500002;

}  // namespace

extern "C" {

int aclInit(const char*) { return 0; }
int aclFinalize() { return 0; }
const char* aclGetRecentErrMsg() { return "emulated ACL"; }
void aclAppLog(int, const char*, const char*, std::uint32_t, const char*, ...) {}

// Devices and contexts.
int aclrtSetDevice(std::int32_t index) {
  device = index;
  return 0;
}
int aclrtResetDevice(std::int32_t) { return 0; }
int aclrtGetDevice(std::int32_t* index) {
  *index = device;
  return 0;
}
int aclrtGetDeviceCount(std::uint32_t* count) {
  *count = 2;
  return 0;
}
const char* aclrtGetSocName() { return "Ascend910B1"; }
int aclrtGetCurrentContext(void** context) {
  static int any;
  *context = &any;
  return 0;
}
int aclrtSetCurrentContext(void*) { return 0; }
int aclrtCreateContext(void** context, std::int32_t) { return aclrtGetCurrentContext(context); }
int aclrtDeviceCanAccessPeer(std::int32_t* can, std::int32_t, std::int32_t) {
  *can = 1;
  return 0;
}
int aclrtDeviceEnablePeerAccess(std::int32_t, std::uint32_t) { return 0; }
int aclrtDeviceGetBareTgid(std::int32_t* pid) {
  *pid = getpid();
  return 0;
}
int aclGetDeviceCapability(std::uint32_t, int, std::int64_t* value) {
  *value = 20;
  return 0;
}
int aclrtGetDeviceInfo(std::uint32_t, int, std::int64_t* value) {
  *value = 20;
  return 0;
}
int aclrtGetSysParamOpt(int, std::int64_t* value) {
  *value = 0;
  return 0;
}
int aclrtCtxGetSysParamOpt(int, std::int64_t* value) {
  *value = 0;
  return 0;
}

// Memory.
int aclrtMalloc(void** pointer, std::size_t bytes, int) {
  if (posix_memalign(pointer, 512, (bytes + 511) & ~std::size_t{511})) return kOutOfMemory;
  used += bytes;
  const std::lock_guard lock(memory_mutex);
  blocks[*pointer] = bytes;
  return 0;
}
int aclrtMallocAlign32(void** pointer, std::size_t bytes, int policy) { return aclrtMalloc(pointer, bytes, policy); }
int aclrtFree(void* pointer) {
  {
    const std::lock_guard lock(memory_mutex);
    if (const auto found = blocks.find(pointer); found != blocks.end()) {
      used -= found->second;
      blocks.erase(found);
    }
  }
  std::free(pointer);
  return 0;
}
int aclrtMallocHost(void** pointer, std::size_t bytes) {
  return posix_memalign(pointer, 4096, bytes ? bytes : 1) ? kOutOfMemory : 0;
}
int aclrtFreeHost(void* pointer) {
  std::free(pointer);
  return 0;
}
int aclrtGetMemInfo(int, std::size_t* free_bytes, std::size_t* total) {
  *total = std::size_t{8} << 30;
  *free_bytes = *total - used;
  return 0;
}
int aclrtPointerGetAttributes(const void*, void* attributes) {
  std::memset(attributes, 0, 16);
  return 0;
}
int aclrtMemcpy(void* dst, std::size_t, const void* src, std::size_t bytes, int) {
  std::memcpy(dst, src, bytes);
  return 0;
}
int aclrtMemcpyAsync(void* dst, std::size_t, const void* src, std::size_t bytes, int kind, void* stream) {
  stream_of(stream)->push([=] {
    const auto start = Clock::now();
    // The bytes are taken at the end of the time that the copy is said to take: a reader that does not wait, or a
    // writer that does not, is found out.
    if (const auto time = duration_of(bytes); time.count() > 0) std::this_thread::sleep_until(start + time);
    std::memcpy(dst, src, bytes);
    trace_copy(stream, kind, bytes, start);
  });
  return 0;
}
int aclrtMemset(void* dst, std::size_t, std::int32_t value, std::size_t bytes) {
  std::memset(dst, value, bytes);
  return 0;
}
int aclrtMemsetAsync(void* dst, std::size_t, std::int32_t value, std::size_t bytes, void* stream) {
  stream_of(stream)->push([=] { std::memset(dst, value, bytes); });
  return 0;
}

// Streams.
int aclrtCreateStream(void** stream) {
  *stream = make_stream();
  return 0;
}
int aclrtCreateStreamWithConfig(void** stream, std::uint32_t, std::uint32_t) { return aclrtCreateStream(stream); }
int aclrtDestroyStream(void*) { return 0; }
int aclrtDestroyStreamForce(void*) { return 0; }
int aclrtSynchronizeStream(void* stream) {
  stream_of(stream)->wait();
  return 0;
}
int aclrtSynchronizeStreamWithTimeout(void* stream, std::int32_t) { return aclrtSynchronizeStream(stream); }
int aclrtStreamQuery(void* stream, int* status) {
  *status = stream_of(stream)->done() ? 0 : 1;
  return 0;
}
int aclrtStreamGetId(void* stream, std::int32_t* id) {
  *id = static_cast<std::int32_t>((reinterpret_cast<std::uintptr_t>(stream) >> 6) & 0x7fffffff);
  return 0;
}
int aclrtGetStreamOverflowSwitch(void*, std::uint32_t* value) {
  *value = 0;
  return 0;
}
int aclrtSynchronizeDevice() {
  stream_of(nullptr);
  std::deque<Stream*> all;
  {
    const std::lock_guard lock(streams_mutex);
    all = streams;
  }
  for (Stream* stream : all) stream->wait();
  return 0;
}
int aclrtSynchronizeDeviceWithTimeout(std::int32_t) { return aclrtSynchronizeDevice(); }

// Events: a record takes the next number, and the stream marks it done when it gets there.
int aclrtCreateEvent(void** event) {
  *event = new Event;
  return 0;
}
int aclrtCreateEventWithFlag(void** event, std::uint32_t) { return aclrtCreateEvent(event); }
int aclrtCreateEventExWithFlag(void** event, std::uint32_t) { return aclrtCreateEvent(event); }
int aclrtDestroyEvent(void*) { return 0; }
int aclrtResetEvent(void*, void*) { return 0; }
int aclrtRecordEvent(void* handle, void* stream) {
  auto* event = static_cast<Event*>(handle);
  std::uint64_t number;
  {
    const std::lock_guard lock(event->mutex);
    number = ++event->recorded;
  }
  stream_of(stream)->push([event, number] {
    const std::lock_guard lock(event->mutex);
    if (number > event->done) event->done = number;
    event->at = Clock::now();
    event->changed.notify_all();
  });
  return 0;
}
int aclrtStreamWaitEvent(void* stream, void* handle) {
  auto* event = static_cast<Event*>(handle);
  std::uint64_t number;
  {
    const std::lock_guard lock(event->mutex);
    number = event->recorded;
  }
  stream_of(stream)->push([event, number] {
    std::unique_lock lock(event->mutex);
    event->changed.wait(lock, [&] { return event->done >= number; });
  });
  return 0;
}
int aclrtSynchronizeEvent(void* handle) {
  auto* event = static_cast<Event*>(handle);
  std::unique_lock lock(event->mutex);
  const std::uint64_t number = event->recorded;
  event->changed.wait(lock, [&] { return event->done >= number; });
  return 0;
}
int aclrtSynchronizeEventWithTimeout(void* event, std::int32_t) { return aclrtSynchronizeEvent(event); }
int aclrtQueryEventStatus(void* handle, int* status) {
  auto* event = static_cast<Event*>(handle);
  *status = event->reached(event->recorded) ? 1 : 0;
  return 0;
}
int aclrtQueryEvent(void* handle, int* status) {
  auto* event = static_cast<Event*>(handle);
  *status = event->reached(event->recorded) ? 0 : 1;
  return 0;
}
int aclrtQueryEventWaitStatus(void* event, int* status) { return aclrtQueryEventStatus(event, status); }
int aclrtEventElapsedTime(float* ms, void* from, void* to) {
  const auto between = static_cast<Event*>(to)->at - static_cast<Event*>(from)->at;
  *ms = std::chrono::duration<float, std::milli>(between).count();
  return 0;
}

// Operators have no kernels.
int aclopCompileAndExecute(...) { return kNoKernel; }
int aclopCompileAndExecuteV2(...) { return kNoKernel; }

// Profiling.
std::uint64_t MsprofGetHashId(const char*, std::size_t) { return 0; }
std::uint64_t MsprofSysCycleTime() { return static_cast<std::uint64_t>(Clock::now().time_since_epoch().count()); }

}  // extern "C"
