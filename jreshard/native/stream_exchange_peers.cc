// How a call of StreamExchange hears from other processes.
#include "stream_exchange.h"

namespace jreshard {
// With the lock held.
bool StreamExchange::published(const Call& call, int chunk, int phase, int source) const {
  const size_t at = slot(chunk, phase, source);
  return local(source) ? call.ready[at] != nullptr : call.told[at];
}

std::string StreamExchange::misfit(int process, const Call& call, const Message& message) const {
  const int rank = message.rank, chunk = message.chunk, phase = message.phase;
  if (message.kind != Message::kPublish) return "a message of another kind";
  if (chunk < 0 || chunk >= plan_.num_chunks()) return "chunk " + std::to_string(chunk);
  if (phase < 0 || phase >= plan_.num_phases()) return "phase " + std::to_string(phase);
  if (rank < 0 || rank >= plan_.num_ranks()) return "rank " + std::to_string(rank);
  if (peers_->placement().process_of[rank] != process) return "a message in the name of " + rank_names_[rank];
  if (phase == 0 ? !plan_.sends(rank) : !plan_.receives(rank)) return rank_names_[rank] + " has nothing to publish";
  if (call.told[slot(chunk, phase, rank)]) return rank_names_[rank] + " has published before";
  const size_t leaves = plan_.chunk_end(chunk) - plan_.chunk_begin(chunk);
  return message.addresses.size() == leaves ? "" : std::to_string(message.addresses.size()) + " addresses";
}

void StreamExchange::heard(int process, const Message& message) {
  std::lock_guard<std::mutex> lock(mutex_);
  const CallPtr call = find(message.call);
  if (!call || !call->error.empty()) return;
  if (message.kind == Message::kAbort) {
    return fail(*call, "jreshard: " + peers_->name(message.rank) + ": " + message.reason, message.rank, message.reason);
  }
  if (const std::string fault = misfit(process, *call, message); !fault.empty()) {
    return fail(*call, "jreshard: " + peers_->name(process) + " sent what does not fit the transfer: " + fault);
  }
  auto& arrays = message.phase == 0 ? call->sources : call->received;
  for (size_t i = 0; i < message.addresses.size(); ++i) {
    const void*& known = arrays[message.rank][plan_.chunk_begin(message.chunk) + i];
    const void* const address = reinterpret_cast<const void*>(message.addresses[i]);
    // Phases after the second tell again what those before have told, and what may be read at this moment.
    if (known == address) continue;
    if (known) {
      return fail(*call, "jreshard: " + peers_->name(process) + " sent other addresses than before");
    }
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
