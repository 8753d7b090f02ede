// Paged attention of several queries per sequence.

#include "isa.h"

#include "attention_prefill_entry.h"
