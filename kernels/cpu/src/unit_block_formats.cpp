// Conversions of weights to and from quantized blocks.

#include "isa.h"

#include "block_dequantize.h"
#include "block_quantize.h"
#include "block_repack.h"
