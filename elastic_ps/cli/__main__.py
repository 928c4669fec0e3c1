import sys

from elastic_ps.cli import main

sys.exit(main())
