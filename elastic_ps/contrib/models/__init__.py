"""Networks, as plain torch modules. `elastic_ps.contrib.zoo.catalog` knows them by name."""

from elastic_ps.contrib.models.gpt import GPT
from elastic_ps.contrib.models.lenet import LeNet, accuracy
from elastic_ps.contrib.models.resnet import ResNet
from elastic_ps.contrib.models.tables import DeepFM, WideDeep, ids_for
from elastic_ps.contrib.models.vgg import VGG

__all__ = ["GPT", "VGG", "DeepFM", "LeNet", "ResNet", "WideDeep", "accuracy", "ids_for"]
