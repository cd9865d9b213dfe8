//! What torch says of a tensor, by the C interface of DLPack 1 (<https://dmlc.github.io/dlpack/latest/c_api.html>). PERF: it takes
//! some 50 ns, where the attributes and methods of the Python object take a microsecond.

use pyo3::exceptions::{PyRuntimeError, PyTypeError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;
use std::ffi::{c_int, c_void};
use std::fmt;
use std::mem::MaybeUninit;

/// `kDLCPU`
pub(super) const CPU: i32 = 1;
/// `kDLInt`
pub(super) const INT: u8 = 0;
/// `kDLFloat`
pub(super) const UINT: u8 = 1;
pub(super) const FLOAT: u8 = 2;
/// `kDLBfloat`
pub(super) const BFLOAT: u8 = 4;

/// `DLDataType`
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct DlType {
    code: u8,
    bits: u8,
    lanes: u16,
}

impl DlType {
    pub(super) const fn new(code: u8, bits: u8) -> DlType {
        DlType { code, bits, lanes: 1 }
    }

    /// Bytes of an element.
    pub(super) fn bytes(self) -> usize {
        usize::from(self.bits) * usize::from(self.lanes) / 8
    }
}

/// The name of the type in torch.
impl fmt::Display for DlType {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.code {
            INT => "int",
            UINT => "uint",
            FLOAT => "float",
            BFLOAT => "bfloat",
            _ => "another kind of ",
        };
        write!(formatter, "{kind}{}", self.bits)
    }
}

/// `DLTensor`. Shape and strides are memory of the tensor.
#[repr(C)]
pub(super) struct DlTensor {
    data: *mut u8,
    pub(super) device_type: i32,
    device_id: i32,
    pub(super) num_dimensions: i32,
    pub(super) dtype: DlType,
    shape: *const i64,
    strides: *const i64,
    byte_offset: u64,
}

impl DlTensor {
    /// The address of the first element.
    pub(super) fn address(&self) -> *mut u8 {
        self.data.wrapping_add(self.byte_offset as usize)
    }

    /// Shape and strides in elements, if there are `N` dimensions.
    pub(super) fn sizes<const N: usize>(&self) -> Option<([usize; N], [usize; N])> {
        // SAFETY: torch states the shape and the strides of every dimension, which are not negative.
        let sizes = |of: *const i64| std::array::from_fn(|index| unsafe { of.add(index).read() } as usize);
        (self.num_dimensions == N as i32).then(|| (sizes(self.shape), sizes(self.strides)))
    }
}

/// `DLPackDLTensorFromPyObjectNoSync`: 0, or -1 with a Python exception set.
type FromPyObject = unsafe extern "C" fn(*mut ffi::PyObject, *mut DlTensor) -> c_int;

/// `DLPackExchangeAPI`, up to the function that is called.
#[repr(C)]
struct ExchangeApi {
    major_version: u32,
    minor_version: u32,
    previous: *const c_void,
    managed_tensor_functions: [*const c_void; 3],
    from_py_object: FromPyObject,
}

struct Torch {
    tensor: Py<PyType>,
    from_py_object: FromPyObject,
}

impl Torch {
    fn load(py: Python<'_>) -> PyResult<Torch> {
        let tensor = py.import("torch")?.getattr("Tensor")?.cast_into::<PyType>()?;
        let capsule = tensor.getattr("__dlpack_c_exchange_api__")?;
        // SAFETY: DLPack says that a capsule of this name has an `ExchangeApi`, which lives as long as the process. All versions start
        // with the version number, and those of major version 1 have these fields.
        unsafe {
            let api =
                ffi::PyCapsule_GetPointer(capsule.as_ptr(), c"dlpack_exchange_api".as_ptr()).cast::<ExchangeApi>();
            if api.is_null() {
                return Err(PyErr::fetch(py));
            }
            match (*api).major_version {
                1 => Ok(Torch { tensor: tensor.unbind(), from_py_object: (*api).from_py_object }),
                other => Err(PyRuntimeError::new_err(format!("torch has DLPack {other}, must be 1"))),
            }
        }
    }
}

/// What a tensor consists of. The result is valid while the tensor lives and is not resized.
pub(super) fn describe(object: &Bound<'_, PyAny>) -> PyResult<DlTensor> {
    static TORCH: PyOnceLock<Torch> = PyOnceLock::new();
    let py = object.py();
    let torch = TORCH.get_or_try_init(py, || Torch::load(py))?;
    let class = object.get_type();
    if !class.is(&torch.tensor) && !class.is_subclass(torch.tensor.bind(py))? {
        return Err(PyTypeError::new_err(format!("is {}, must be a tensor", class.name()?)));
    }
    let mut described = MaybeUninit::uninit();
    // SAFETY: the object is a tensor, and on success the function has written all fields.
    unsafe {
        match (torch.from_py_object)(object.as_ptr(), described.as_mut_ptr()) {
            0 => Ok(described.assume_init()),
            _ => {
                let cause = PyErr::fetch(py); // a device that DLPack does not know, or a tensor without memory
                let error =
                    PyTypeError::new_err(format!("is on device {}, must be on the CPU", object.getattr("device")?));
                error.set_cause(py, Some(cause));
                Err(error)
            }
        }
    }
}
