// Paged attention of one query per sequence.

#include "isa.h"

#include "attention_decode_entry.h"
