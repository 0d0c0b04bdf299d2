#include "peer_messages.h"

#include <cstring>
#include <stdexcept>

namespace jreshard {
namespace {

constexpr size_t kMaxReason = 4096;

// Both sides run on one machine: fields are in its byte order.
struct Head {
  uint32_t kind;
  uint32_t call;
  int64_t key;
  int32_t rank;
  int32_t chunk;
  int32_t phase;
  uint32_t tail_bytes;
};

}  // namespace

std::vector<char> encode(const Message& message) {
  const bool abort = message.kind == Message::kAbort;
  const std::string reason = message.reason.substr(0, kMaxReason);
  const void* const tail = abort ? static_cast<const void*>(reason.data()) : message.addresses.data();
  const size_t tail_bytes = abort ? reason.size() : message.addresses.size() * sizeof(uint64_t);
  const Head head{message.kind,
                  message.call,
                  message.key,
                  message.rank,
                  message.chunk,
                  message.phase,
                  static_cast<uint32_t>(tail_bytes)};
  std::vector<char> bytes(sizeof head + tail_bytes);
  std::memcpy(bytes.data(), &head, sizeof head);
  if (tail_bytes) std::memcpy(bytes.data() + sizeof head, tail, tail_bytes);
  return bytes;
}

Message decode(const char* bytes, size_t size) {
  Head head;
  if (size < sizeof head) throw std::invalid_argument("it is too short");
  std::memcpy(&head, bytes, sizeof head);
  if (head.kind < Message::kPublish || head.kind > Message::kAbort) {
    throw std::invalid_argument("its kind is " + std::to_string(head.kind));
  }
  if (head.tail_bytes != size - sizeof head) throw std::invalid_argument("its length is not what it says");
  Message message{static_cast<Message::Kind>(head.kind), head.call, head.key, head.rank, head.chunk, head.phase};
  const char* const tail = bytes + sizeof head;
  if (head.kind == Message::kAbort) {
    message.reason.assign(tail, head.tail_bytes);
  } else if (head.kind == Message::kPublish && head.tail_bytes % sizeof(uint64_t) == 0) {
    message.addresses.resize(head.tail_bytes / sizeof(uint64_t));
    if (head.tail_bytes) std::memcpy(message.addresses.data(), tail, head.tail_bytes);
  } else if (head.tail_bytes) {
    throw std::invalid_argument("it ends in " + std::to_string(head.tail_bytes) + " bytes that do not belong there");
  }
  return message;
}

}  // namespace jreshard
