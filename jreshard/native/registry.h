// The exchanges of this process, by the key that compiled programs carry as an attribute.
#pragma once

#include <cstdint>
#include <memory>

#include "exchange.h"

namespace jreshard {

// Null where no plan of that key is open.
std::shared_ptr<Exchange> find_exchange(int64_t key);

}  // namespace jreshard
