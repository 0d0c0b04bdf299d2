// Connected sockets, and what a link sends over them, byte by byte: for tests that play the other process.
#pragma once

#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <string>
#include <utility>

#include "check.h"
#include "descriptor.h"

constexpr uint64_t kHelloMagic = 0x6472'6168'7365'726A;

inline std::pair<jreshard::Descriptor, jreshard::Descriptor> socket_pair() {
  int ends[2];
  CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
  return {jreshard::Descriptor(ends[0]), jreshard::Descriptor(ends[1])};
}

template <typename... Fields>
std::string packed(Fields... fields) {
  std::string out;
  (out.append(reinterpret_cast<const char*>(&fields), sizeof fields), ...);
  return out;
}

inline std::string frame(const std::string& body, uint32_t attached = 0) {
  return packed(uint32_t(body.size()), attached) + body;
}

inline std::string hello_frame(uint64_t magic, uint32_t version = 1, int32_t process = 1) {
  return frame(packed(magic, version, process));
}

inline void greet(int socket, int process) {
  const std::string bytes = hello_frame(kHelloMagic, 1, process);
  CHECK(write(socket, bytes.data(), bytes.size()) == ssize_t(bytes.size()));
}
