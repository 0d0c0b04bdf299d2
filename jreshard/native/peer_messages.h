// What processes tell each other about a call. One side publishes, the other reads, says that it has, and has that
// confirmed; either may give up.
//
//   PUBLISH  source -> reader   "these are the addresses of a chunk's arrays; they may be read in this phase"
//   DONE     reader -> source   "this rank has read all that it wants of your arrays in this chunk and phase"
//   CONFIRM  source -> reader   "I had not given the arrays up by then: what was read counts"
//   ABORT    any -> all others  "the call has failed, for this reason"
//
// GPUs of several processes need two more, which go with a file descriptor (or, an older kind of memory, without):
//
//   LEND   source -> reader   "this is the arena in which arrays lie that I am going to publish"
//   FLAGS  any -> any         "this is the page of flags for the plan: streams write and wait for them there"
//
// What holds when something fails:
// - A source's release, and the receive of a destination that others read in a later phase, succeed only after the DONE
//   of every remote reader: until then JAX leaves the arrays alone. A reader that is lost fails the source's call.
// - A source that fails tells all others, gives its memory back at once, and asks nobody. A reader in the midst of
//   reading then gets what it should not use, into arrays of its own, and no CONFIRM, so that its call fails too.
// - A source answers DONE with CONFIRM only while its call has not failed: what was read before was still there. The
//   reader succeeds, and lets later phases read the result, only with the CONFIRM of every process that it read from.
//   If the source fails after that, what the reader holds is good all the same.
// - CONFIRM lost with its sender: the reader fails, though its bytes may be right.
// PUBLISH waits for nothing but earlier phases, DONE for PUBLISH, CONFIRM for DONE, and a later phase's PUBLISH for the
// CONFIRMs of the phases before: no circle can come of it. Each message is sent once, in order, over one link.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace jreshard {

struct Message {
  enum Kind : uint32_t { kPublish = 1, kDone = 2, kConfirm = 3, kAbort = 4, kLend = 5, kFlags = 6 };

  Kind kind = kAbort;
  uint32_t call = 0;
  int64_t key = 0;    // of the plan
  int32_t rank = 0;   // whose arrays (PUBLISH) or who has read (DONE, CONFIRM); ABORT: the process that failed first
  int32_t chunk = 0;  // not in ABORT
  int32_t phase = 0;  // not in ABORT
  std::vector<uint64_t> addresses = {};  // PUBLISH: one a leaf of the chunk. LEND: id, base and bytes of the arena
  std::string reason = {};               // ABORT. LEND: the older kind's handle
};

std::vector<char> encode(const Message& message);
// Throws std::invalid_argument where the bytes are not a message.
Message decode(const char* bytes, size_t size);

}  // namespace jreshard
