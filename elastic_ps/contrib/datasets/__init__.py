"""Data sets, as map-style torch data sets. Nothing is downloaded.

`elastic_ps.contrib.zoo.catalog` knows them by name.
"""

from elastic_ps.contrib.datasets.cifar import cifar10, cifar100
from elastic_ps.contrib.datasets.clicks import auc, clicks
from elastic_ps.contrib.datasets.digits import digits
from elastic_ps.contrib.datasets.mnist import mnist
from elastic_ps.contrib.datasets.text import text

__all__ = ["auc", "cifar10", "cifar100", "clicks", "digits", "mnist", "text"]
