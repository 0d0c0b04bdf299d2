// The exchanges of this process, by the key that compiled programs carry as an attribute.
#pragma once

#include <cstdint>
#include <map>
#include <memory>

#include "exchange.h"

namespace jreshard {

struct Opened {
  std::shared_ptr<Exchange> exchange;
  std::map<int32_t, int> rank_of;  // by device ordinal
};

// Without an exchange where no plan of that key is open.
Opened find_exchange(int64_t key);

}  // namespace jreshard
