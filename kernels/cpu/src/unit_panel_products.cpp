// Products with weights in panels, and conversions of panels.

#include "isa.h"

#include "panels.h"
#include "panels_convert.h"
