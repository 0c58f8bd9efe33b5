from trust_tta.data.check import check_root as check_root
from trust_tta.data.class_matching import match_classes as match_classes
from trust_tta.data.class_names import imagenet_classes as imagenet_classes
from trust_tta.data.corrupt_dataset import corrupt_array as corrupt_array
from trust_tta.data.corrupt_dataset import corrupt_folder as corrupt_folder
from trust_tta.data.corruptions.apply import corrupt as corrupt
from trust_tta.data.dataset import Dataset as Dataset
from trust_tta.data.dataset import align_classes as align_classes
from trust_tta.data.dataset import array_dataset as array_dataset
from trust_tta.data.dataset import join_datasets as join_datasets
from trust_tta.data.fetch import fetch_cifar10 as fetch_cifar10
from trust_tta.data.images import read_image as read_image
from trust_tta.data.loading import available_domains as available_domains
from trust_tta.data.loading import open_dataset as open_dataset
from trust_tta.data.sample import load_sample as load_sample
from trust_tta.data.streams import StreamConfig as StreamConfig
from trust_tta.data.streams import stream_datasets as stream_datasets

__all__: list[str]
