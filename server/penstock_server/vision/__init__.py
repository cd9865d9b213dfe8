"""Images: files become pixel values in a limited process (`reader`), and these become embeddings by the vision tower of
transformers (`tower`), on a thread of low priority beside the steps (`encoder`). What differs between families is data
(`family`)."""
