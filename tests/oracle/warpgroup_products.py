"""Products of warp groups in Hopper's machine code: do their descriptors hold an address of shared memory?

A descriptor is a pair of uniform registers that is computed from the base of the program's shared memory.
ptxas of CUDA 12.8 has taken another register for the base, which held half of a pointer. The product then
reads wherever that number points.
"""

import re
import subprocess

INSTRUCTION = re.compile(r"\s*/\*([0-9a-f]+)\*/\s+(?:@!?U?P\d+\s+)?(\S+)\s+(.*?)\s*;")


def machine_code(cubin: bytes, path: str) -> str:
    """The listing of a compiled kernel, which is written to `path`."""
    import triton

    with open(path, "wb") as file:
        file.write(cubin)
    command = [triton.knobs.nvidia.nvdisasm.path, "-c", path]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def misled_products(listing: str) -> tuple[int, list[str]]:
    """How many products there are, and the places of those whose descriptor follows from an argument.

    Goes through the listing once, in order, and follows arguments of the kernel and the program's number
    through uniform registers. Does not follow them through the registers of threads.
    """
    follow, found, products = set[int](), [], 0
    for line in listing.splitlines():
        instruction = INSTRUCTION.match(line)
        if not instruction:
            continue
        place, name, operands = instruction.groups()
        if name.startswith("HGMMA"):
            products += 1
            first = int(operands.split("gdesc[UR")[1].split("]")[0])
            if follow & {first + 2, first + 3}:  # the second factor's descriptor
                found.append(place)
            continue
        target, _, sources = operands.partition(",")
        register = re.match(r"UR(\d+)", target)
        if not register:
            continue
        read = {int(number) for number in re.findall(r"\bUR(\d+)", sources)}
        if name.endswith(".64"):
            read |= {number + 1 for number in read}
        of_argument = "c[0x0]" in sources or "CTAID" in sources or bool(read & follow)
        wide = ".64" in name or "WIDE" in name
        written = {int(register[1]), int(register[1]) + wide}
        follow = follow | written if of_argument else follow - written
    return products, found
