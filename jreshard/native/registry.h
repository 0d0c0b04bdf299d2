// The exchanges of this process, by the key that compiled programs carry as an attribute.
#pragma once

#include <cstdint>
#include <map>
#include <memory>

#include "exchange.h"
#include "stream_exchange.h"

namespace jreshard {

struct Opened {
  std::shared_ptr<Exchange> host;  // one of the two
  std::shared_ptr<StreamExchange> stream;
  std::map<int32_t, int> rank_of;  // by device ordinal

  std::shared_ptr<OpenCalls> calls() const { return host ? std::shared_ptr<OpenCalls>(host) : stream; }
};

// With neither where no plan of that key is open.
Opened find_exchange(int64_t key);

}  // namespace jreshard
