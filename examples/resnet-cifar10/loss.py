"""The cross entropy of MindSpore's tutorial, in the operators of its formula."""

from mindspore import nn, ops


class SoftmaxCrossEntropyExpand(nn.Cell):
    """The mean of -log(softmax(scores)) at the labels, of scores (N, C).

    With `sparse` the labels (N,) are the classes' numbers, else one row of C probabilities each. It equals
    nn.CrossEntropyLoss, as a graph of small operators: if a model is split over devices each can be placed alone.
    """

    def __init__(self, sparse=False):
        super().__init__()
        self.sparse = sparse

    def construct(self, scores, labels):
        shifted = scores - scores.max(-1, keepdims=True)  # exp of it is at most 1
        exponentials = ops.exp(shifted)
        if self.sparse:
            labels = ops.one_hot(labels, scores.shape[-1]).astype(scores.dtype)
        # log(softmax) without the softmax, which may be 0
        log_softmax = shifted - ops.log(exponentials.sum(-1, keepdims=True))
        return -(labels * log_softmax).sum(-1).mean()
