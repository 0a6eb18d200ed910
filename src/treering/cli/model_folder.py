"""Checks the files of a Hugging Face model folder before it is loaded, so that an error names the file and the fix."""

import pickle
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from treering.errors import InputError
from treering.files.json_object import read_object

# In the order in which transformers takes them.
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
# As safetensors and torch call them.
_FLOATS = ("F64", "F32", "F16", "BF16", "float64", "float32", "float16", "bfloat16", "BOOL", "bool")
_POINTER = b"version https://git-lfs"


def check_model_folder(folder: Path, setting: str = "model.path") -> None:
    """Checks that a folder holds config.json and whole files of weights; reads headers only.

    `setting` is what errors call the folder. Pickled weights (.bin) are opened with `weights_only` and run no code.

    Raises:
        InputError: names the file that is missing, cut, a Git LFS pointer or in another format, or the weight whose
            numbers are quantized without a word in the configuration.

    Example: a model.safetensors of half its size is refused with "fetch it again".
    """
    if not folder.is_dir():
        raise InputError(f"{setting} names the folder of a Hugging Face model, and {folder} is no folder; correct it")
    config = folder / "config.json"
    if not config.is_file() and (folder / "adapter_config.json").is_file():
        raise InputError(f"{folder} holds an adapter and no config.json; merge it into its model, and name that folder")
    if not config.is_file():
        raise InputError(f"a model folder holds config.json, and {folder} has none; correct {setting}")
    _check_no_pointer(config)
    described = read_object(config)
    if "model_type" not in described:
        raise InputError(f"{config}: a model's configuration names its model_type, and this one does not; correct it")
    # Quantized weights are read by the method that the configuration names.
    is_plain = "quantization_config" not in described
    for file in _weight_files(folder):
        not_floats = _check_weights(file)
        if is_plain and not_floats:
            name, dtype = not_floats[0]
            raise InputError(
                f"{file}: a model without quantization_config has weights in float32, bfloat16 or float16, and {name} "
                f"is {dtype}, whose scale nothing tells; add the quantization_config that the weights were written "
                "with, or fetch the model unquantized"
            )


def _weight_files(folder: Path) -> list[Path]:
    file = next((folder / name for name in _WEIGHTS if (folder / name).is_file()), None)
    if file is None:
        raise InputError(
            f"a model folder holds its weights in model.safetensors or in numbered parts with an index, and {folder} "
            "has neither; fetch them"
        )
    if file.suffix != ".json":
        return [file]
    _check_no_pointer(file)
    parts = read_object(file).get("weight_map")
    if not isinstance(parts, dict) or not all(isinstance(part, str) for part in parts.values()):
        raise InputError(f"{file}: an index names the file of each weight in weight_map; fetch it again")
    return [folder / part for part in sorted(set(parts.values()))]


def _check_weights(file: Path) -> list[tuple[str, str]]:
    """Opens a file; returns name and dtype of matrices in it that are no plain floating-point numbers."""
    try:
        _check_no_pointer(file)
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as weights:
                slices = ((name, weights.get_slice(name)) for name in weights.keys())  # noqa: SIM118
                kinds = [(name, each.get_dtype(), len(each.get_shape())) for name, each in slices]
        else:
            loaded = torch.load(file, map_location="meta", weights_only=True)
            named = loaded.items() if isinstance(loaded, dict) else ()
            tensors = [(name, each) for name, each in named if isinstance(each, torch.Tensor)]
            kinds = [(name, str(each.dtype).removeprefix("torch."), each.ndim) for name, each in tensors]
    except FileNotFoundError as error:
        raise InputError(f"{file} is named by the index of its folder and missing; fetch it") from error
    except SafetensorError as error:
        raise InputError(f"{file} is cut or no safetensors file ({error}); fetch it again") from error
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        # torch's own message goes on with advice to turn weights_only off.
        reason = type(error).__name__
        raise InputError(f"{file} is cut, or holds other things than weights ({reason}); fetch it again") from error
    # Vectors and ids, such as stored positions, may be integers.
    return [(n, dtype) for n, dtype, num_axes in kinds if num_axes > 1 and dtype not in _FLOATS and "_ids" not in n]


def _check_no_pointer(file: Path) -> None:
    with file.open("rb") as stream:
        if stream.read(len(_POINTER)) == _POINTER:
            raise InputError(f"{file} is a Git LFS pointer instead of the file itself; fetch it with `git lfs pull`")
