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
  uint32_t number_bytes;
  uint32_t reason_bytes;
};

}  // namespace

std::vector<char> encode(const Message& message) {
  const std::string reason = message.reason.substr(0, kMaxReason);
  const size_t numbers = message.addresses.size() * sizeof(uint64_t);
  const Head head{message.kind,
                  message.call,
                  message.key,
                  message.rank,
                  message.chunk,
                  message.phase,
                  static_cast<uint32_t>(numbers),
                  static_cast<uint32_t>(reason.size())};
  std::vector<char> bytes(sizeof head + numbers + reason.size());
  std::memcpy(bytes.data(), &head, sizeof head);
  if (numbers) std::memcpy(bytes.data() + sizeof head, message.addresses.data(), numbers);
  if (!reason.empty()) std::memcpy(bytes.data() + sizeof head + numbers, reason.data(), reason.size());
  return bytes;
}

Message decode(const char* bytes, size_t size) {
  Head head;
  if (size < sizeof head) throw std::invalid_argument("it is too short");
  std::memcpy(&head, bytes, sizeof head);
  if (head.kind < Message::kPublish || head.kind > Message::kFlags) {
    throw std::invalid_argument("its kind is " + std::to_string(head.kind));
  }
  if (uint64_t{head.number_bytes} + head.reason_bytes != size - sizeof head || head.number_bytes % sizeof(uint64_t)) {
    throw std::invalid_argument("its length is not what it says");
  }
  const bool has_numbers = head.kind == Message::kPublish || head.kind == Message::kLend;
  const bool has_reason = head.kind == Message::kAbort || head.kind == Message::kLend;
  if ((head.number_bytes && !has_numbers) || (head.reason_bytes && !has_reason)) {
    throw std::invalid_argument("it ends in bytes that do not belong there");
  }
  Message message{static_cast<Message::Kind>(head.kind), head.call, head.key, head.rank, head.chunk, head.phase};
  const char* const tail = bytes + sizeof head;
  message.addresses.resize(head.number_bytes / sizeof(uint64_t));
  if (head.number_bytes) std::memcpy(message.addresses.data(), tail, head.number_bytes);
  message.reason.assign(tail + head.number_bytes, head.reason_bytes);
  return message;
}

}  // namespace jreshard
