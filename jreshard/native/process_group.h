// The processes that take part in a plan, as one of them sees it: which ranks are whose, and what they tell each other
// about a call, whatever kind of exchange carries it out. What the messages mean is in peer_messages.h.
#pragma once

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "copy_plan.h"
#include "peers.h"
#include "process_map.h"

namespace jreshard {

class ProcessGroup {
 public:
  using CallId = uint32_t;

  // Why a call has failed.
  struct Failure {
    std::string error;   // what this process raises
    int origin;          // the process that failed first
    std::string reason;  // what that one said, for the others to pass on
  };

  // `plan` and `rank_names`, how errors name each rank, are to outlive the group.
  ProcessGroup(const CopyPlan& plan, const std::vector<std::string>& rank_names, ProcessMap map);

  // Whether all ranks live in this process. Then only local(), key(), processes_of(), partners() and found() may be
  // asked.
  bool alone() const { return !map_.peers; }
  bool local(int rank) const { return alone() || map_.process_of[rank] == self(); }

  int64_t key() const { return map_.key; }
  Peers& peers() const { return *map_.peers; }
  int self() const { return map_.peers->self(); }
  int process_of(int rank) const { return map_.process_of[rank]; }
  std::string name(int process) const { return map_.peers->name(process); }
  // The other processes in which these ranks live.
  std::set<int> processes_of(const std::vector<int>& ranks) const;
  // The other processes that local ranks read from or are read by.
  const std::set<int>& partners() const { return partners_; }

  // When the call can hear: has `listener` hear of it from now on, at once of what came before, and of partners that
  // are missing already.
  void enter(CallId id, const std::shared_ptr<Peers::Listener>& listener) const;
  // The call has ended, with an error or with empty text.
  void leave(CallId id, const std::string& error) const;

  void tell(int process, Message::Kind kind, CallId id, int chunk, int phase, int rank) const;
  // Tells the processes that read them where the arrays of a local rank's chunk are, `arrays` being its first leaf's.
  void publish(CallId id, int rank, int chunk, int phase, const void* const* arrays) const;
  // Everybody passes on what fails a call: not all processes need to be linked to all.
  void tell_failure(CallId id, const Failure& failure) const;

  // A failure that this process has found, that an ABORT has told, and that a message is which does not fit.
  Failure found(const std::string& error) const;
  Failure told(const Message& abort) const;
  Failure misfit(int process, const std::string& fault) const;
  // What is wrong with a message of `process`, whatever the call has come to; or empty text.
  std::string fault(int process, const Message& message) const;

 private:
  const CopyPlan& plan_;
  const std::vector<std::string>& rank_names_;
  const ProcessMap map_;
  std::set<int> partners_;
  std::set<int> others_;  // all other processes of the plan
};

}  // namespace jreshard
