//! Typed views of torch tensors: the check between Python and the kernels. An argument's type says its dtype and number of dimensions;
//! a tensor on another device, or another object, raises TypeError. A method checks sizes, which raise ValueError, before it passes
//! addresses on.

use super::dlpack::{self, DlTensor, DlType};
use crate::element;
use crate::pool::{Source, Target};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;

/// A number that a tensor may contain.
pub(super) trait Number: Copy {
    /// Its dtype's name in torch.
    const NAME: &'static str;
    /// Its dtype in DLPack.
    const DTYPE: DlType;
}

impl Number for u8 {
    const NAME: &'static str = "uint8";
    const DTYPE: DlType = DlType::new(dlpack::UINT, 8);
}

impl Number for element::Element {
    const NAME: &'static str = element::NAME;
    const DTYPE: DlType = if cfg!(element = "f32") {
        DlType::new(dlpack::FLOAT, 32)
    } else if cfg!(element = "f16") {
        DlType::new(dlpack::FLOAT, 16)
    } else {
        DlType::new(dlpack::BFLOAT, 16)
    };
}

impl Number for i8 {
    const NAME: &'static str = "int8";
    const DTYPE: DlType = DlType::new(dlpack::INT, 8);
}

impl Number for f32 {
    const NAME: &'static str = "float32";
    const DTYPE: DlType = DlType::new(dlpack::FLOAT, 32);
}

impl Number for i32 {
    const NAME: &'static str = "int32";
    const DTYPE: DlType = DlType::new(dlpack::INT, 32);
}

impl Number for i64 {
    const NAME: &'static str = "int64";
    const DTYPE: DlType = DlType::new(dlpack::INT, 64);
}

/// A tensor on the CPU with `N` dimensions. It keeps the tensor alive. INVARIANT: the elements that shape and strides describe are
/// memory of the tensor, which the caller does not change during a call.
pub(super) struct View<'py, T, const N: usize> {
    tensor: Bound<'py, PyAny>,
    address: *mut T,
    shape: [usize; N],
    strides: [usize; N],
}

fn on_cpu(object: &Bound<'_, PyAny>) -> PyResult<DlTensor> {
    let described = dlpack::describe(object)?;
    if described.device_type == dlpack::CPU {
        return Ok(described);
    }
    let device = object.getattr("device")?;
    Err(PyTypeError::new_err(format!("is on device {device}, must be on the CPU")))
}

/// Shape and strides in elements.
fn sizes<const N: usize>(described: &DlTensor) -> PyResult<([usize; N], [usize; N])> {
    let given = described.num_dimensions;
    described.sizes().ok_or_else(|| PyTypeError::new_err(format!("has {given} dimensions, must have {N}")))
}

impl<'py, T: Number, const N: usize> FromPyObject<'_, 'py> for View<'py, T, N> {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let described = on_cpu(&object)?;
        if described.dtype != T::DTYPE {
            let dtype = object.getattr("dtype")?;
            return Err(PyTypeError::new_err(format!("has dtype {dtype}, must be torch.{}", T::NAME)));
        }
        let (shape, strides) = sizes(&described)?;
        Ok(View { address: described.address().cast(), shape, strides, tensor: object.to_owned() })
    }
}

impl<'py, T: Number, const N: usize> View<'py, T, N> {
    /// The sizes of its dimensions.
    pub(super) fn shape(&self) -> [usize; N] {
        self.shape
    }

    /// The tensor, for an owner of its address.
    pub(super) fn tensor(&self) -> Py<PyAny> {
        self.tensor.clone().unbind()
    }

    /// Fails unless it has this shape.
    pub(super) fn expect(&self, name: &str, shape: [usize; N]) -> PyResult<&Self> {
        if self.shape == shape {
            return Ok(self);
        }
        Err(PyValueError::new_err(format!("{name} has shape {:?}, must be {shape:?}", self.shape)))
    }

    /// Elements of a row, which is everything but the first dimension.
    fn row_size(&self) -> usize {
        self.shape[1..].iter().product()
    }

    /// The address, and the elements from row to row, whose own elements must be contiguous. Rows may repeat or overlap.
    pub(super) fn rows(&self, name: &str) -> PyResult<(Source<T>, usize)> {
        let mut size = 1;
        let is_empty = self.shape.contains(&0);
        for (&length, &stride) in self.shape.iter().zip(&self.strides).skip(1).rev() {
            if length > 1 && stride != size && !is_empty {
                let (shape, strides) = (self.shape, self.strides);
                let message = format!("{name} has shape {shape:?} and strides {strides:?}, must have contiguous rows");
                return Err(PyValueError::new_err(message));
            }
            size *= length;
        }
        let stride = if self.shape[0] > 1 && !is_empty { self.strides[0] } else { size };
        Ok((Source::new(self.address), stride))
    }

    /// Like `rows`, for rows that are written: they must not overlap.
    pub(super) fn rows_mut(&self, name: &str) -> PyResult<(Target<T>, usize)> {
        let (_, stride) = self.rows(name)?;
        if stride < self.row_size() {
            let message = format!("{name} has strides {:?}, its rows must not overlap", self.strides);
            return Err(PyValueError::new_err(message));
        }
        Ok((Target::new(self.address), stride))
    }

    /// The address of contiguous elements.
    pub(super) fn source(&self, name: &str) -> PyResult<Source<T>> {
        let (address, stride) = self.rows(name)?;
        if stride != self.row_size() {
            let (shape, strides) = (self.shape, self.strides);
            let message = format!("{name} has shape {shape:?} and strides {strides:?}, must be contiguous");
            return Err(PyValueError::new_err(message));
        }
        Ok(address)
    }

    /// The address of contiguous elements that are written.
    pub(super) fn target(&self, name: &str) -> PyResult<Target<T>> {
        self.source(name).map(|_| Target::new(self.address))
    }

    /// Contiguous elements.
    pub(super) fn elements(&self, name: &str) -> PyResult<&[T]> {
        let address = self.source(name)?.at(0);
        let count = self.shape.iter().product();
        if count == 0 {
            return Ok(&[]);
        }
        // SAFETY: the tensor is contiguous, lives as long as `self`, and is not changed during the call.
        Ok(unsafe { std::slice::from_raw_parts(address, count) })
    }
}

impl View<'_, i64, 1> {
    /// The address of indices that are contiguous and below `end`. The error names `what` they index.
    pub(super) fn indices(&self, name: &str, end: usize, what: &str) -> PyResult<Source<i64>> {
        let is_outside = |&index: &i64| usize::try_from(index).map_or(true, |index| index >= end);
        if let Some(index) = self.elements(name)?.iter().copied().find(is_outside) {
            return Err(PyValueError::new_err(format!("{name} contains {index}, there are {end} {what}")));
        }
        self.source(name)
    }
}

/// A tensor [rows, columns] of any dtype on the CPU, as bytes. The elements of a row are contiguous.
pub(super) struct Rows<'py> {
    _tensor: Bound<'py, PyAny>,
    address: *mut u8,
    pub(super) num_rows: usize,
    num_columns: usize,
    pub(super) dtype: DlType,
    /// Bytes from row to row.
    pub(super) stride_bytes: usize,
}

impl<'py> FromPyObject<'_, 'py> for Rows<'py> {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let described = on_cpu(&object)?;
        let ([num_rows, num_columns], [row_stride, stride]) = sizes(&described)?;
        if num_columns > 1 && stride != 1 {
            return Err(PyValueError::new_err(format!("has elements {stride} apart, must have contiguous rows")));
        }
        let dtype = described.dtype;
        let stride_bytes = if num_rows > 1 { row_stride } else { num_columns } * dtype.bytes();
        let address = described.address();
        Ok(Rows { _tensor: object.to_owned(), address, num_rows, num_columns, dtype, stride_bytes })
    }
}

impl Rows<'_> {
    /// Fails unless it has this shape and dtype.
    pub(super) fn expect(&self, name: &str, shape: [usize; 2], dtype: DlType) -> PyResult<()> {
        let (given, given_dtype) = ([self.num_rows, self.num_columns], self.dtype);
        if (given, given_dtype) == (shape, dtype) {
            return Ok(());
        }
        let message = format!("{name} has shape {given:?} and dtype {given_dtype}, must have {shape:?} and {dtype}");
        Err(PyValueError::new_err(message))
    }

    pub(super) fn address(&self) -> Source<u8> {
        Source::new(self.address)
    }

    /// The address of contiguous rows that are written.
    pub(super) fn target(&self, name: &str) -> PyResult<Target<u8>> {
        let row_bytes = self.num_columns * self.dtype.bytes();
        if self.stride_bytes != row_bytes {
            let stride = self.stride_bytes;
            let message = format!("{name} has rows {stride} bytes apart, must be contiguous: {row_bytes}");
            return Err(PyValueError::new_err(message));
        }
        Ok(Target::new(self.address))
    }
}
