// How a call of StreamExchange hears from other processes.
#include "stream_exchange.h"

namespace jreshard {
// With the lock held.
bool StreamExchange::published(const Call& call, int chunk, int phase, int source) const {
  const size_t at = slot(chunk, phase, source);
  return local(source) ? call.ready[at] != nullptr : call.told[at];
}

std::string StreamExchange::fault(int process, const Call& call, const Message& message) const {
  if (message.kind != Message::kPublish) return "a message of another kind";
  if (std::string wrong = group_.fault(process, message); !wrong.empty()) return wrong;
  const bool told = call.told[slot(message.chunk, message.phase, message.rank)];
  return told ? rank_names_[message.rank] + " has published before" : "";
}

void StreamExchange::heard(int process, const Message& message) {
  std::lock_guard<std::mutex> lock(mutex_);
  const CallPtr call = find(message.call);
  if (!call || !call->error.empty()) return;
  if (message.kind == Message::kAbort) return fail(*call, group_.told(message));
  if (const std::string wrong = fault(process, *call, message); !wrong.empty()) {
    return fail(*call, group_.misfit(process, wrong));
  }
  auto& arrays = message.phase == 0 ? call->sources : call->received;
  for (size_t i = 0; i < message.addresses.size(); ++i) {
    const void*& known = arrays[message.rank][plan_.chunk_begin(message.chunk) + i];
    const void* const address = reinterpret_cast<const void*>(message.addresses[i]);
    // Phases after the second tell again what those before have told, and what may be read at this moment.
    if (known == address) continue;
    if (known) return fail(*call, group_.misfit(process, "other addresses than before"));
    known = address;
  }
  call->told[slot(message.chunk, message.phase, message.rank)] = true;
  changed_.notify_all();
}

void StreamExchange::lost(CallId id, int process, const std::string& error) {
  std::lock_guard<std::mutex> lock(mutex_);
  const CallPtr call = find(id);
  if (call && peers_->needs(id, process)) fail(*call, error);
}

void StreamExchange::record_end(const CallPtr& call, int rank, cuda::Stream stream) {
  cuda::Event end = nullptr;
  if (peers_) enqueue(call, rank, stream, [&] { end = record(call, rank, stream); });
  std::lock_guard<std::mutex> lock(mutex_);
  if (end) call->ends.push_back(end);
  end_launch(call);
}

}  // namespace jreshard
