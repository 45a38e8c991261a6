"""What tests import, whichever of the three modules it is in."""

from digits import *
from forked import *
from started import *
