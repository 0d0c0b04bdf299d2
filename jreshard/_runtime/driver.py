"""The CUDA driver's functions that Python calls, through `ctypes`; the core has its own access to the driver.

Names and numbers are those of cuda.h, whose ABI the driver keeps.
"""

import ctypes
from typing import Any

VMM_SUPPORTED = 102  # CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
POSIX_FD_SUPPORTED = 103  # CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
P2P_NATIVE_ATOMICS = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED

_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE


class DriverError(RuntimeError):
    """The driver is missing, or one of its functions failed.

    Attributes:
        result: what the function returned; `None` where there is none.
    """

    def __init__(self, message: str, result: int | None = None) -> None:
        super().__init__(message)
        self.result = result


class Driver:
    """The driver of this process.

    Args:
        library: libcuda.so.1, or what stands in for it.
    """

    def __init__(self, library: Any) -> None:
        self._library = library

    def call(self, name: str, *args: Any) -> None:
        """Calls a function of the driver.

        Raises:
            DriverError: it does not exist, or returned an error.
        """
        function = getattr(self._library, name, None)
        if function is None:
            raise DriverError(f"the NVIDIA driver has no {name}; update it")
        if result := function(*args):
            raise DriverError(f"{name} failed: {self._error_text(result)} ({result})", result)

    def _error_text(self, result: int) -> str:
        text = ctypes.c_char_p()
        self._library.cuGetErrorString(result, ctypes.byref(text))
        return text.value.decode() if text.value else "unknown error"

    def api_version(self) -> str:
        """The newest CUDA that the driver serves, such as `13.0`."""
        version = ctypes.c_int()
        self.call("cuDriverGetVersion", ctypes.byref(version))
        return f"{version.value // 1000}.{version.value % 1000 // 10}"

    def device_count(self) -> int:
        """GPUs that this process may use."""
        try:
            self.call("cuInit", 0)
        except DriverError as error:
            if error.result == _NO_DEVICE:
                return 0
            raise
        count = ctypes.c_int()
        self.call("cuDeviceGetCount", ctypes.byref(count))
        return count.value

    def attribute(self, ordinal: int, attribute: int) -> int:
        """An attribute of the GPU with this number in the process."""
        value = ctypes.c_int()
        self.call("cuDeviceGetAttribute", ctypes.byref(value), attribute, ordinal)
        return value.value

    def pci_bus_id(self, ordinal: int) -> str:
        """Where the GPU sits on the PCI bus, such as `0000:1B:00.0`."""
        text = ctypes.create_string_buffer(32)
        self.call("cuDeviceGetPCIBusId", text, len(text), ordinal)
        return text.value.decode()

    def uuid(self, ordinal: int) -> str:
        """What tells the GPU from all others, in 32 hex digits; a MIG instance has its own."""
        digits = ctypes.create_string_buffer(16)
        self.call("cuDeviceGetUuid_v2", digits, ordinal)
        return digits.raw.hex()

    def can_access_peer(self, reader: int, owner: int) -> bool:
        """Whether one GPU can be given access to the memory of the other."""
        value = ctypes.c_int()
        self.call("cuDeviceCanAccessPeer", ctypes.byref(value), reader, owner)
        return bool(value.value)

    def p2p_attribute(self, attribute: int, a: int, b: int) -> int:
        """An attribute of the way between two GPUs."""
        value = ctypes.c_int()
        self.call("cuDeviceGetP2PAttribute", ctypes.byref(value), attribute, a, b)
        return value.value


def open_driver() -> Driver:
    """The driver of this machine.

    Raises:
        DriverError: it is not installed.
    """
    try:
        return Driver(ctypes.CDLL("libcuda.so.1"))
    except OSError as error:
        raise DriverError(f"the NVIDIA driver (libcuda.so.1) cannot be loaded: {error}") from error
