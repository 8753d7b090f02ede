// Norms, activations, and other operations on the numbers of a row.

#include "isa.h"

#include "elementwise.h"
#include "pointwise.h"
