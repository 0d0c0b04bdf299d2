// Device memory that one process lends to others on the same host.
//
// JAX's allocators take memory from the driver in large pieces, arenas, and give it out bit by bit. The owner exports
// an arena once; the others map it into their own address space, and find every array of it there.
#pragma once

#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

#include "cuda_driver.h"
#include "descriptor.h"

namespace jreshard {

// An arena as its owner describes it. Either a descriptor goes with it, or it is of the older kind and has `ipc`.
struct Arena {
  uint64_t id = 0;  // different for all that the owner has ever had
  uint64_t base = 0;
  uint64_t bytes = 0;
  std::vector<char> ipc = {};

  bool holds(uint64_t address) const { return address >= base && address - base < bytes; }
};

// The arenas of this process.
class ArenaExports {
 public:
  explicit ArenaExports(const cuda::Driver& driver) : driver_(driver) {}

  // The arena that `address` lies in. The context of its device has to be current. Throws std::runtime_error where the
  // driver doesn't know, or the allocator is of a kind whose memory cannot be lent.
  Arena find(uint64_t address);
  // A descriptor to send with an arena that find() gave; none for the older kind. Throws std::runtime_error.
  Descriptor lend(const Arena& arena);

 private:
  const cuda::Driver& driver_;
  std::mutex mutex_;
  std::map<uint64_t, Arena> known_;  // by base
};

// The arenas of one other process, mapped here as they are needed.
class ArenaImports {
 public:
  // Arenas that are mapped at a time: an allocator that frees arenas would otherwise never see its memory again.
  static constexpr size_t kMostMapped = 64;

  explicit ArenaImports(const cuda::Driver& driver) : driver_(driver) {}
  ~ArenaImports();
  ArenaImports(const ArenaImports&) = delete;
  ArenaImports& operator=(const ArenaImports&) = delete;

  // Takes in what the owner has sent.
  void add(Arena arena, Descriptor handle);
  // Where an address of the owner is found in this process, by the device of that ordinal, whose context has to be
  // current. Throws std::runtime_error.
  const void* translate(uint64_t address, int ordinal);
  // Unmaps what its owner has freed, and what is too many, the longest unused first. Nothing may be reading.
  void trim();

 private:
  struct Import {
    Arena arena;
    Descriptor handle;
    cuda::DevicePtr mapped = 0;                  // for all devices
    std::set<int> devices = {};                  // that may reach it
    std::map<int, cuda::DevicePtr> opened = {};  // of the older kind, by device

    bool used() const { return mapped || !opened.empty(); }
  };

  void map(Import& import);
  void allow(Import& import, int ordinal);
  cuda::DevicePtr open(Import& import, int ordinal);
  void unmap(Import& import);

  const cuda::Driver& driver_;
  std::mutex mutex_;
  std::list<Import> imports_;  // the last used first
  std::list<Import> gone_;     // what other arenas have taken the place of
};

}  // namespace jreshard
