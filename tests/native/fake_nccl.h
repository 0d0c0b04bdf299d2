// A stand-in for NCCL, on the streams of the stand-in for the driver. As the real one, it connects a pair of ranks when
// both first use it, takes messages between two ranks in their order, and keeps a stream waiting until all messages of
// its group have met their other ends. What a communicator is asked for is under way for a few polls. One lives at a
// time, for any number of communicators: each unique id makes another one.
#pragma once

#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "fake_driver.h"
#include "nccl_library.h"

namespace fake_nccl {

struct Operation {
  bool sends;
  int peer;
  char* data;
  size_t bytes;
};

// The messages of one rank in one group: a kernel.
struct Group {
  jreshard::cuda::Stream stream;
  std::vector<Operation> operations;
  bool arrived = false;
  bool aborted = false;
  size_t left = 0;  // messages that have not met their other ends
};

// What a thread has begun and not ended.
struct OpenGroup {
  int depth = 0;
  int error = 0;
  std::map<jreshard::nccl::Comm, std::shared_ptr<Group>> by_comm;
};

// From one rank to another: what has arrived on one side only.
struct Channel {
  bool send_offered = false, receive_offered = false;
  std::deque<std::pair<Group*, const Operation*>> sends, receives;
};

struct World {
  size_t ranks;
  std::set<int> joined;
  std::map<std::pair<int, int>, Channel> channels;
};

}  // namespace fake_nccl

namespace jreshard::nccl {

struct ncclComm {
  std::shared_ptr<fake_nccl::World> world;
  int rank;
  jreshard::cuda::Context context;
  int polls_left = 0;
  int users = 0;  // threads that have added to a group and not ended it
  Result failure = kSuccess;
  std::deque<std::shared_ptr<fake_nccl::Group>> pending;
  std::vector<std::shared_ptr<fake_nccl::Group>> launched;
};

}  // namespace jreshard::nccl

class FakeNccl {
 public:
  using Comm = jreshard::nccl::Comm;
  using Result = jreshard::nccl::Result;
  using UniqueId = jreshard::nccl::UniqueId;
  using Lock = std::unique_lock<std::mutex>;

  static constexpr Result kTold = 3, kInvalidArgument = 4, kRemoteError = 6;

  FakeNccl(FakeDriver& driver, uint32_t seed) : driver_(driver), random_(seed) {
    active_ = this;
    table_.GetUniqueId = [](UniqueId* id) {
      return enter("ncclGetUniqueId", [&](Lock&) {
        std::memset(id, 0, sizeof *id);
        std::memcpy(id, &++active_->worlds_made_, sizeof active_->worlds_made_);
        return 0;
      });
    };
    table_.CommInitRankConfig = [](Comm* comm, int ranks, UniqueId id, int rank, jreshard::nccl::Config* config) {
      return enter("ncclCommInitRankConfig",
                   [&](Lock&) { return config->blocking ? kInvalidArgument : active_->init(comm, ranks, id, rank); });
    };
    table_.CommGetAsyncError = [](Comm comm, Result* state) {
      return enter("ncclCommGetAsyncError", [&](Lock&) {
        if (!active_->is_live(comm)) return kInvalidArgument;
        *state = active_->poll(*comm);
        return 0;
      });
    };
    table_.CommAbort = [](Comm comm) {
      return enter("ncclCommAbort", [&](Lock& lock) { return active_->abort(comm, lock); });
    };
    table_.GroupStart = [] {
      return enter("ncclGroupStart", [](Lock&) {
        ++group_.depth;
        return 0;
      });
    };
    table_.GroupEnd = [] {
      // One that fails has ended the group too.
      const Result told = enter("ncclGroupEnd", [](Lock&) { return 0; });
      if (told) group_.error = told;
      const Lock lock(active_->driver_.mutex());
      return active_->end_group();
    };
    table_.Send = [](const void* data, size_t bytes, int type, int peer, Comm comm, jreshard::cuda::Stream stream) {
      char* const source = static_cast<char*>(const_cast<void*>(data));
      return enter("ncclSend", [&](Lock&) { return active_->add({true, peer, source, bytes}, type, comm, stream); });
    };
    table_.Recv = [](void* data, size_t bytes, int type, int peer, Comm comm, jreshard::cuda::Stream stream) {
      char* const target = static_cast<char*>(data);
      return enter("ncclRecv", [&](Lock&) { return active_->add({false, peer, target, bytes}, type, comm, stream); });
    };
    table_.GetErrorString = [](Result result) { return result == kTold ? "as told" : "misuse or a lost peer"; };
    table_.GetLastError = [](Comm) { return ""; };
  }
  ~FakeNccl() {
    let_aborts_return();
    const Lock lock(driver_.mutex());
    CHECK(comms_.empty());
    active_ = nullptr;
  }
  FakeNccl(const FakeNccl&) = delete;
  FakeNccl& operator=(const FakeNccl&) = delete;

  const jreshard::nccl::Library& table() const { return table_; }
  UniqueId unique_id() {
    UniqueId id;
    CHECK(table_.GetUniqueId(&id) == 0);
    return id;
  }

  // Has the n-th call of a function from now fail; n counts from 0.
  void fail(const std::string& function, int n) {
    const Lock lock(driver_.mutex());
    failing_ = {function, calls_[function] + n};
  }
  // Has the communicators of a rank find an error after its launches.
  void lose_peer_of(int rank) {
    const Lock lock(driver_.mutex());
    for (const auto& [comm, owned] : comms_) {
      if (comm->rank == rank) comm->failure = kRemoteError;
    }
  }
  // From now on aborts do not return, and kernels go on waiting.
  void hang_aborts() {
    const Lock lock(driver_.mutex());
    aborts_hang_ = true;
  }
  void let_aborts_return() {
    Lock lock(driver_.mutex());
    aborts_hang_ = false;
    changed_.notify_all();
    CHECK(changed_.wait_for(lock, std::chrono::seconds(60), [&] { return aborting_ == 0; }));
  }
  // How many have met their other ends.
  size_t messages() {
    const Lock lock(driver_.mutex());
    return messages_;
  }

 private:
  template <typename Action>
  static Result enter(const std::string& function, Action action) {
    Lock lock(active_->driver_.mutex());
    if (std::pair(function, active_->calls_[function]++) == active_->failing_) {
      group_.error = group_.depth ? kTold : 0;
      return kTold;
    }
    const Result result = action(lock);
    if (group_.depth && result && result != jreshard::nccl::kInProgress) group_.error = result;
    return result;
  }

  bool is_live(Comm comm) const { return CHECK(comms_.count(comm)); }

  Result init(Comm* comm, int ranks, const UniqueId& id, int rank) {
    auto& world = worlds_[std::string(id.bytes, sizeof id.bytes)];
    if (!world) world = std::make_shared<fake_nccl::World>(fake_nccl::World{size_t(ranks), {}, {}});
    CHECK(world->ranks == size_t(ranks) && rank < ranks && world->joined.insert(rank).second);
    auto made = std::make_unique<jreshard::nccl::ncclComm>();
    *comm = made.get();
    made->world = world;
    made->rank = rank;
    made->context = FakeDriver::context();
    made->polls_left = polls();
    comms_[*comm] = std::move(made);
    return jreshard::nccl::kInProgress;
  }
  int polls() { return random_() % 4; }

  Result add(const fake_nccl::Operation& operation, int type, Comm comm, jreshard::cuda::Stream stream) {
    if (!is_live(comm) || !CHECK(group_.depth == 1) || !CHECK(type == jreshard::nccl::kUint8)) return kInvalidArgument;
    CHECK(operation.data && operation.bytes && operation.peer != comm->rank);
    CHECK(operation.peer >= 0 && size_t(operation.peer) < comm->world->ranks);
    CHECK(stream->context == comm->context);
    CHECK(comm->polls_left == 0 && comm->pending.empty());  // else it would not take anything
    auto& group = group_.by_comm[comm];
    if (!group) {
      group = std::make_shared<fake_nccl::Group>();
      ++comm->users;
    }
    group->stream = stream;
    group->operations.push_back(operation);
    return 0;
  }

  Result end_group() {
    if (!CHECK(group_.depth > 0) || --group_.depth > 0) return kInvalidArgument;
    const Result error = std::exchange(group_.error, 0);
    for (auto& [comm, group] : std::exchange(group_.by_comm, {})) {
      --comm->users;
      if (error) continue;
      for (const auto& operation : group->operations) {
        fake_nccl::Channel& channel = channel_of(*comm, operation);
        (operation.sends ? channel.send_offered : channel.receive_offered) = true;
      }
      comm->pending.push_back(group);
      comm->polls_left = polls();
    }
    return error ? error : jreshard::nccl::kInProgress;
  }

  static fake_nccl::Channel& channel_of(jreshard::nccl::ncclComm& comm, const fake_nccl::Operation& operation) {
    return operation.sends ? comm.world->channels[{comm.rank, operation.peer}]
                           : comm.world->channels[{operation.peer, comm.rank}];
  }

  Result poll(jreshard::nccl::ncclComm& comm) {
    if (comm.failure) return comm.failure;
    if (comm.world->joined.size() < comm.world->ranks) return jreshard::nccl::kInProgress;
    if (comm.polls_left > 0) {
      --comm.polls_left;
      return jreshard::nccl::kInProgress;
    }
    while (!comm.pending.empty()) {
      if (!can_launch(comm, *comm.pending.front())) return jreshard::nccl::kInProgress;
      launch(comm, comm.pending.front());
      comm.pending.pop_front();
    }
    return 0;
  }
  bool can_launch(jreshard::nccl::ncclComm& comm, const fake_nccl::Group& group) {
    for (const auto& operation : group.operations) {
      const fake_nccl::Channel& channel = channel_of(comm, operation);
      if (!channel.send_offered || !channel.receive_offered) return false;
    }
    return driver_.has_room(group.stream);
  }
  void launch(jreshard::nccl::ncclComm& comm, const std::shared_ptr<fake_nccl::Group>& group) {
    auto& launched = comm.launched;
    launched.erase(
        std::remove_if(launched.begin(), launched.end(), [](const auto& g) { return g->arrived && g->left == 0; }),
        launched.end());
    launched.push_back(group);
    group->left = group->operations.size();
    group->stream->queue.push_back({[this, group, world = comm.world, rank = comm.rank] {
                                      if (!group->aborted && !group->arrived) arrive(*world, rank, *group);
                                      return group->aborted || group->left == 0;
                                    },
                                    [] {}});
  }

  void arrive(fake_nccl::World& world, int rank, fake_nccl::Group& group) {
    group.arrived = true;
    for (const auto& operation : group.operations) {
      const auto ends = operation.sends ? std::pair(rank, operation.peer) : std::pair(operation.peer, rank);
      fake_nccl::Channel& channel = world.channels[ends];
      (operation.sends ? channel.sends : channel.receives).emplace_back(&group, &operation);
      if (!channel.sends.empty() && !channel.receives.empty()) meet(channel);
    }
  }
  void meet(fake_nccl::Channel& channel) {
    auto [sender, send] = channel.sends.front();
    auto [receiver, receive] = channel.receives.front();
    if (CHECK(send->bytes == receive->bytes)) std::memcpy(receive->data, send->data, send->bytes);
    channel.sends.pop_front();
    channel.receives.pop_front();
    --sender->left;
    --receiver->left;
    ++messages_;
  }

  Result abort(Comm comm, Lock& lock) {
    ++aborting_;
    changed_.wait(lock, [&] { return !aborts_hang_; });
    --aborting_;
    changed_.notify_all();
    if (!is_live(comm)) return kInvalidArgument;
    CHECK(comm->users == 0);
    for (const auto& group : comm->launched) {
      group->aborted = true;
      for (auto& [ends, channel] : comm->world->channels) {
        for (auto* side : {&channel.sends, &channel.receives}) {
          side->erase(std::remove_if(side->begin(), side->end(), [&](const auto& e) { return e.first == group.get(); }),
                      side->end());
        }
      }
    }
    comms_.erase(comm);
    return 0;
  }

  inline static FakeNccl* active_ = nullptr;
  inline static thread_local fake_nccl::OpenGroup group_;

  FakeDriver& driver_;  // whose lock guards all that follows
  std::mt19937 random_;
  jreshard::nccl::Library table_{};
  std::condition_variable changed_;
  std::map<std::string, std::shared_ptr<fake_nccl::World>> worlds_;
  std::map<Comm, std::unique_ptr<jreshard::nccl::ncclComm>> comms_;
  std::map<std::string, int> calls_;
  std::pair<std::string, int> failing_;
  int64_t worlds_made_ = 0;
  size_t messages_ = 0;
  bool aborts_hang_ = false;
  int aborting_ = 0;
};
