// The exchanges of this process, by the key that compiled programs carry as an attribute.
#pragma once

#include <cstdint>
#include <map>
#include <memory>

#include "gpu_exchange.h"
#include "host_exchange.h"

namespace jreshard {

struct Opened {
  // `ordinals` has the device of each local rank.
  explicit Opened(const std::map<int, int>& ordinals) {
    for (const auto& [rank, ordinal] : ordinals) rank_by_ordinal[ordinal] = rank;
  }

  std::shared_ptr<HostExchange> host;  // one of the two
  std::shared_ptr<GpuExchange> gpu;
  std::map<int32_t, int> rank_by_ordinal;

  Exchange& calls() const { return host ? static_cast<Exchange&>(*host) : *gpu; }
  // -1 where no rank of the plan is on this device.
  int rank_of(int32_t ordinal) const {
    auto found = rank_by_ordinal.find(ordinal);
    return found == rank_by_ordinal.end() ? -1 : found->second;
  }
};

// Null where no plan of that key is open.
std::shared_ptr<const Opened> find_opened(int64_t key);

}  // namespace jreshard
