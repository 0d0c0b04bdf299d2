#include "flag_page.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <stdexcept>
#include <system_error>
#include <utility>

namespace jreshard {
namespace {

static_assert(std::atomic<uint64_t>::is_always_lock_free && sizeof(std::atomic<uint64_t>) == sizeof(uint64_t));

[[noreturn]] void fail(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

size_t whole_pages(size_t count) {
  const size_t page = sysconf(_SC_PAGESIZE);
  return (count * sizeof(uint64_t) + page - 1) / page * page;
}

Descriptor make(size_t bytes) {
  Descriptor page(memfd_create("jreshard-flags", MFD_CLOEXEC));
  if (!page) fail("memfd_create");
  if (ftruncate(page.get(), static_cast<off_t>(bytes))) fail("ftruncate");
  return page;
}

}  // namespace

FlagPage::FlagPage(size_t count) : page_(make(whole_pages(count))), count_(count), bytes_(whole_pages(count)) { map(); }

FlagPage::FlagPage(Descriptor page, size_t count) : page_(std::move(page)), count_(count), bytes_(whole_pages(count)) {
  struct stat status;
  if (fstat(page_.get(), &status)) fail("fstat");
  if (static_cast<size_t>(status.st_size) < bytes_) {
    throw std::invalid_argument("a process sent a page with too few flags");
  }
  map();
}

void FlagPage::map() {
  void* const start = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, page_.get(), 0);
  if (start == MAP_FAILED) fail("mmap");
  flags_ = static_cast<std::atomic<uint64_t>*>(start);
}

FlagPage::~FlagPage() {
  if (driver_) driver_->MemHostUnregister(flags_);
  munmap(flags_, bytes_);
}

void FlagPage::fill(uint64_t value) {
  for (size_t i = 0; i < count_; ++i) flags_[i].store(value, std::memory_order_release);
}

void FlagPage::attach(const cuda::Driver& driver) {
  std::lock_guard<std::mutex> lock(attaching_);
  if (driver_) return;
  cuda::check(driver, driver.MemHostRegister(flags_, bytes_, cuda::kHostRegisterPortableMapped), "cuMemHostRegister");
  const cuda::Result result = driver.MemHostGetDevicePointer(&device_, flags_, 0);
  if (result != cuda::kSuccess) driver.MemHostUnregister(flags_);
  cuda::check(driver, result, "cuMemHostGetDevicePointer");
  driver_ = &driver;
}

}  // namespace jreshard
