// Products by a matrix unit (AMX).

#include "isa.h"

#if defined(WINDLASS_AMX)
#include "amx_linear.h"
#endif
