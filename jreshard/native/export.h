// What Python and XLA find in the library; all else is hidden.
#pragma once

#define JRESHARD_EXPORT extern "C" __attribute__((visibility("default")))
