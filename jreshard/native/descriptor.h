// A file descriptor that closes itself.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <utility>

namespace jreshard {

class Descriptor {
 public:
  explicit Descriptor(int fd = -1) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }

  int get() const { return fd_; }
  // Another descriptor of the same file; an invalid one where there are too many.
  Descriptor duplicate() const { return Descriptor(fcntl(fd_, F_DUPFD_CLOEXEC, 0)); }
  explicit operator bool() const { return fd_ >= 0; }

 private:
  int fd_;
};

}  // namespace jreshard
