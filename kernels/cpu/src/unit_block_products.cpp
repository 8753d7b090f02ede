// Products with weights in quantized blocks.

#include "isa.h"

#include "block_linear.h"
